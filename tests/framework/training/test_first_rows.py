"""The pass at the start of a run, which shows the structure of model and loss, computes a few rows of the batch."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import loopscope
import pytest
import torch
from loopscope.hooks import HookPoint, MetricInfo, Metrics, RunDataContext, TrainingHook
from loopscope.training.loss_probe import FEW
from torch import Tensor, nn

ROWS = 8
Loss = Callable[[nn.Module, Any], Tensor]


class Probe(TrainingHook):
    """A hook that may compute the loss."""

    name = "probe"
    hook_points = frozenset({HookPoint.POST_STEP})
    needs_loss = True

    def compute(self, ctx: RunDataContext) -> Metrics:
        return {}

    def describe_metrics(self) -> Sequence[MetricInfo]:
        return []


def sizes_at_start(tmp_path: Path, loss: Loss, batch: Any, **options: Any) -> tuple[list[int], dict[str, nn.Module]]:
    """Return the numbers of rows of which the start of a run computes the loss, and the modules that it finds."""
    sizes: list[int] = []

    def recording(model: nn.Module, given: Any) -> Tensor:
        sizes.append(len(given["x"]))
        return loss(model, given)

    model = nn.Linear(4, 1)
    scope = loopscope.attach(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        hooks=[Probe()],
        loss=recording,
        out=tmp_path / "run",
        display="none",
        **options,
    )
    next(iter(scope.batches([batch])))
    found = dict(scope._attached.manager.state.also)
    at_start = [*sizes]
    scope.close()
    return at_start, found


def critical(critic: nn.Module) -> Loss:
    return lambda model, batch: critic(model(batch["x"])).mean()


@pytest.mark.filterwarnings("ignore:The scope ends without a step")
def test_first_rows_show_the_modules(tmp_path: Path) -> None:
    critic = nn.Linear(1, 1)
    sizes, found = sizes_at_start(tmp_path, critical(critic), {"x": torch.ones(ROWS, 4), "weight": torch.tensor(2.0)})
    assert (sizes, [*found.values()]) == ([FEW], [critic])


def demanding(critic: nn.Module) -> Loss:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        assert len(batch["x"]) == ROWS
        return critical(critic)(model, batch)

    return loss


def without_graph_for_few_rows(critic: nn.Module) -> Loss:
    return lambda model, batch: critical(critic)(model, batch) if len(batch["x"]) > FEW else torch.zeros(())


@pytest.mark.filterwarnings("ignore:The scope ends without a step")
@pytest.mark.parametrize("make", [demanding, without_graph_for_few_rows])
def test_other_losses_get_the_whole_batch(tmp_path: Path, make: Callable[[nn.Module], Loss]) -> None:
    """A loss that fails for a few rows, or that has no graph there, is computed again."""
    critic = nn.Linear(1, 1)
    sizes, found = sizes_at_start(tmp_path, make(critic), {"x": torch.ones(ROWS, 4)})
    assert (sizes, [*found.values()]) == ([FEW, ROWS], [critic])


@pytest.mark.filterwarnings("ignore:The scope ends without a step")
def test_tensors_of_other_lengths_are_not_cut(tmp_path: Path) -> None:
    """Rows of a graph's edges and of its nodes do not belong together."""
    batch = {"x": torch.ones(ROWS, 4), "edges": torch.zeros(2, 5)}
    assert sizes_at_start(tmp_path, critical(nn.Linear(1, 1)), batch)[0] == [ROWS]


class Sliceless:
    """A batch that is no container, whose rows cannot be taken."""

    def __init__(self) -> None:
        self.x = torch.ones(ROWS, 4)

    def __getitem__(self, name: str) -> Tensor:
        return getattr(self, name)


@pytest.mark.filterwarnings("ignore:The scope ends without a step")
def test_objects_that_cannot_be_cut_stay_whole(tmp_path: Path) -> None:
    assert sizes_at_start(tmp_path, critical(nn.Linear(1, 1)), Sliceless())[0] == [ROWS]


@pytest.mark.compile
@pytest.mark.filterwarnings("ignore:The scope ends without a step")
def test_compiled_losses_are_not_compiled_for_rows(tmp_path: Path) -> None:
    """torch.compile would choose other kernels for the training if it had met another shape before."""
    compiled: list[int] = []

    def backend(graph: Any, inputs: list[Tensor]) -> Callable[..., Any]:
        compiled.append(len(inputs))
        return graph.forward

    head = torch.compile(lambda outputs: outputs.square().mean(), backend=backend)
    sizes, _ = sizes_at_start(tmp_path, lambda model, batch: head(model(batch["x"])), {"x": torch.ones(ROWS, 4)})
    assert sizes == [FEW]
    assert compiled == []
    head(torch.ones(ROWS, 1))
    assert compiled
