"""The hook ``laws`` in an attached loop, and hooks that end a loop."""

from pathlib import Path

import loopscope
import pytest
import torch
from loopscope import RunDataContext, TrainingHook
from loopscope.errors import UsageError
from loopscope.hooks import HookPoint, Metrics
from torch import nn

ONE_LAW = {"laws": {"only": ["rows_do_not_mix"], "steps": [1, 2]}}


class EndsAtThird(TrainingHook):
    """An observer that has seen enough at the third step."""

    name = "ends_at_third"
    hook_points = frozenset({HookPoint.POST_STEP})
    _steps = 0

    def compute(self, ctx: RunDataContext) -> Metrics:
        """Count the steps."""
        self._steps = ctx.step
        return {}

    @property
    def is_finished(self) -> bool:
        """Whether three steps were made."""
        return self._steps >= 3


class InheritsTheEnd(EndsAtThird):
    """A subclass, which ends trainings as well."""


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> int:
    made = 0
    for _ in range(steps):
        loss = model(torch.randn(8, 3)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        made += 1
    return made


def attached(folder: Path, **options) -> tuple[loopscope.Scope, nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return loopscope.attach(model, optimizer, out=folder, display="none", **options), model, optimizer


def test_scope_returns_the_results_of_laws(tmp_path: Path) -> None:
    scope, model, optimizer = attached(tmp_path / "run", hooks=["laws"], hook_options=ONE_LAW)
    with scope:
        assert train(model, optimizer, 6) == 6
        (result,) = scope.check()
    assert (result["law"], result["verdict"]) == ("rows_do_not_mix", "holds")
    assert (tmp_path / "run" / "laws.json").is_file()


def test_scope_without_laws_refuses_to_check(tmp_path: Path) -> None:
    scope, _, _ = attached(tmp_path / "run", hooks=[])
    with scope, pytest.raises(UsageError, match=r'attach with hooks=\["laws"\]'):
        scope.check()


@pytest.mark.parametrize("kind", [EndsAtThird, InheritsTheEnd])
def test_finished_hook_ends_the_loop(kind: type[TrainingHook], tmp_path: Path) -> None:
    scope, model, optimizer = attached(tmp_path / "run", hooks=[kind()])
    with pytest.raises(SystemExit) as end, scope:
        train(model, optimizer, 6)
    assert end.value.code == 0
    assert scope.steps == 3
