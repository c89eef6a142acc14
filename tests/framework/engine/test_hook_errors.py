"""Errors of hooks that the caller named: which of them end a training that loopscope only watches."""

import json
from pathlib import Path
from typing import Any

import loopscope
import pytest
import torch
from loopscope import HookPoint, InterventionHook, RunDataContext, TrainingHook
from loopscope.errors import HookError, UnsuitableError, UsageError
from loopscope.hooks import StatePart
from torch import nn


class Faulty(TrainingHook):
    """Raises at a step."""

    name = "faulty"
    hook_points = frozenset({HookPoint.POST_STEP})
    metrics = "number | the number 1 | 1 | Nothing."

    def __init__(self, *, at: int = 3, error: type[Exception] = ZeroDivisionError) -> None:
        self._at, self._error = at, error

    def compute(self, ctx: RunDataContext) -> dict[str, Any]:
        if ctx.step == self._at:
            raise self._error("a fault of the hook")
        return {"number": 1}


class FaultyIntervention(Faulty, InterventionHook):
    """Raises at a step; its changes are undone."""

    def intervene(self, run_ctx: RunDataContext, model_ctx: Any) -> dict[str, Any]:
        return self.compute(run_ctx)


class FaultyTreatment(FaultyIntervention):
    """Raises at a step, and changes the gradients at others."""

    hook_points = frozenset({HookPoint.POST_BACKWARD})
    commits = frozenset({StatePart.GRADIENTS})


def trained(folder: Path, hook: TrainingHook | None, **options: Any) -> torch.Tensor:
    """Train six steps with a hook, and return the weights."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with loopscope.attach(model, optimizer, hooks=[hook] if hook else [], out=folder, **options) as scope:
        for batch in scope.batches([torch.ones(2, 4)] * 6):
            scope.backward((model(batch) - 1.0).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    return model.weight.detach()


@pytest.mark.guarantee("errors-are-contained")
@pytest.mark.parametrize("kind", [Faulty, FaultyIntervention])
def test_measuring_hooks_never_end_a_training(kind, tmp_path: Path, capsys) -> None:
    """The training has the bits of one without the hook; display and summary name the hook and its line."""
    with pytest.warns(UserWarning, match="'faulty' raised at POST_STEP of step 3: ZeroDivisionError"):
        watched = trained(tmp_path / "run", kind(), display="none")
    assert torch.equal(watched, trained(tmp_path / "bare", None, display="none"))
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("completed", 6)
    (entry,) = summary["hook_errors"]
    assert (entry["hook"], entry["step"]) == ("faulty", 3)
    assert "test_hook_errors.py" in entry["traceback"]
    with pytest.warns(UserWarning, match=r"The run continues without this hook\."):
        trained(tmp_path / "shown", kind())
    assert "without faulty (at step 3), which raised" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("hook", "options"), [(Faulty(), {"on_hook_error": "raise"}), (FaultyTreatment(), {})], ids=["raise", "treatment"]
)
def test_training_ends_where_it_would_be_another(hook, options, tmp_path: Path) -> None:
    """Without a hook that commits, the training would be another one."""
    with pytest.raises(HookError, match="a fault of the hook"):
        trained(tmp_path / "run", hook, display="none", **options)


@pytest.mark.parametrize("error", [UsageError, UnsuitableError])
def test_refusals_of_the_first_step_end_the_run(error, tmp_path: Path) -> None:
    with pytest.raises(HookError, match="a fault of the hook"):
        trained(tmp_path / "run", Faulty(at=1, error=error), display="none")
