"""What a forward pass shows about the modules that a loss uses, and that hooks share one such pass."""

from pathlib import Path
from typing import Any

import loopscope
import torch
from loopscope.hooks import HookPoint, RunInfo, TrainingHook
from loopscope.training import ObservedPass
from torch import Tensor, nn


class Scores(nn.Module):
    """An embedding with a projection, and a layer that the forward pass does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 4)
        self.unused = nn.Linear(4, 4)
        self.head = nn.Linear(4, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.table(tokens))


def test_pass_records_called_modules_and_last_matrices() -> None:
    """The head made the output, and a matrix outside of the model the loss; neither the table nor its input did."""
    model, outside = Scores(), nn.Parameter(torch.randn(5, 2))
    seen = ObservedPass()
    with seen.observe(model):
        output = model(torch.arange(5))
    seen.add_loss((output @ outside).sum())
    assert seen.called == {"", "table", "head"}
    assert [matrix is model.head.weight for matrix in seen.of_output] == [True]
    assert seen.made_by(model.head.weight)
    assert seen.made_by(outside)
    assert not seen.made_by(model.table.weight)


def test_record_keeps_no_other_leaf_alive() -> None:
    """Leaves that a loss creates to differentiate with respect to them are not recorded."""
    seen = ObservedPass()
    points = torch.randn(3, 4, requires_grad=True)
    seen.add_loss((points @ torch.randn(4, 2)).sum())
    assert seen.of_loss == []


class Looking(TrainingHook):
    """A hook that reads the pass when it starts."""

    hook_points = frozenset({HookPoint.POST_STEP})
    needs_loss = True

    def __init__(self, name: str) -> None:
        self.name = name
        self.seen: ObservedPass | None = None

    def start(self, run: RunInfo) -> None:
        assert run.observed_first_pass is not None
        self.seen = run.observed_first_pass()

    def compute(self, ctx: Any) -> dict[str, float]:
        return {}

    def describe_metrics(self) -> list[Any]:
        return []


def test_all_hooks_share_one_pass(tmp_path: Path) -> None:
    """The loss is computed once before the first step, also to find the modules that it uses."""
    model = Scores()
    calls: list[int] = []

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        calls.append(len(batch))
        return nn.functional.cross_entropy(model(batch), batch)

    hooks = [Looking("one"), Looking("two")]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with loopscope.attach(model, optimizer, hooks=hooks, loss=loss, out=tmp_path / "run", display="none") as scope:
        for batch in scope.batches([torch.arange(5)]):
            assert len(calls) == 1
            scope.backward(nn.functional.cross_entropy(model(batch), batch))
            optimizer.step()
    assert hooks[0].seen is not None
    assert hooks[0].seen is hooks[1].seen
    assert hooks[0].seen.made_by(model.head.weight)
