"""``scope.diagnose(test=True)`` in callbacks of Trainers: effects, and a training that continues as without it."""

from pathlib import Path
from typing import Any

import lightning.pytorch as lightning
import pytest
import torch
from loopscope.integrations import attach
from transformers import TrainerCallback

from . import test_lightning
from .hf_trainers import Trace, attached, same, trainer

pytestmark = [
    pytest.mark.trainer,
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning", "ignore:.*:UserWarning:lightning"),
]
HIGH = 5.0


class Diagnosing(TrainerCallback):
    """Diagnoses after the first step."""

    scope: Any = None
    diagnosis: Any = ()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.scope is not None and state.global_step == 1:
            self.diagnosis = self.scope.diagnose(test=True, steps=3)


def hf_trace(folder: Path, *, test: bool) -> tuple[Any, Any]:
    """Train at a learning rate that is too high; return the trace with the next draw, and the diagnosis."""
    trace, diagnosing = Trace(), Diagnosing()
    options = {"learning_rate": HIGH, "per_device_train_batch_size": 8, "max_steps": 4, "max_grad_norm": 0.0}
    made = trainer(folder, diagnosing, trace, **options)
    scope = attached(made, [], with_hooks="health", audit=False)
    diagnosing.scope = scope if test else None
    made.train()
    return (trace.steps, torch.rand(3)), diagnosing.diagnosis


@pytest.mark.slow
@pytest.mark.guarantee("interventions-are-undone")
def test_hugging_face_continues_bit_for_bit(tmp_path):
    """Weights, moments and random streams at every step are those of a training without tests."""
    tested, diagnosis = hf_trace(tmp_path / "tested", test=True)
    assert any(item.tests for item in diagnosis)
    assert same(tested, hf_trace(tmp_path / "plain", test=False)[0])


class DiagnosingLightning(lightning.Callback):
    """Diagnoses after the second batch."""

    def __init__(self) -> None:
        self.scope, self.diagnosis = None, ()

    def on_train_batch_end(self, trainer: Any, module: Any, *rest: Any) -> None:
        if self.scope is not None and trainer.global_step == 2:
            self.diagnosis = self.scope.diagnose(test=True, steps=3)


def lightning_trace(folder: Path, *, test: bool) -> tuple[Any, Any]:
    """Fit at a learning rate that is too high; return the trace and the diagnosis."""
    torch.manual_seed(1)
    trace, diagnosing = test_lightning.Trace(), DiagnosingLightning()
    made = test_lightning.trainer(folder, callbacks=[diagnosing, trace])
    given = {"loader": test_lightning.batches(), "out": folder / "run", "display": "none"}
    scope = attach(made, with_hooks="health", **given)
    diagnosing.scope = scope if test else None
    made.fit(test_lightning.Classifier(lr=HIGH), test_lightning.batches(shuffle=True))
    return trace.rows, diagnosing.diagnosis


@pytest.mark.guarantee("interventions-are-undone")
def test_lightning_continues_bit_for_bit(tmp_path):
    """Weights, moments and random streams after every batch are those of a fit without tests."""
    tested, diagnosis = lightning_trace(tmp_path / "tested", test=True)
    assert any(item.tests for item in diagnosis)
    assert tested == lightning_trace(tmp_path / "plain", test=False)[0]
