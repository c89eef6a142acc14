"""The hooks of outputs in Hugging Face's Trainer."""

import math
from pathlib import Path
from typing import Any

import pytest
from loopscope.hooks import TrainingHook
from loopscope.training_hooks.outputs import OutputLogits, TokenLoss

from tests.framework.integrations.hf_trainers import ROWS, InOrder, attached, same, traced, trainer
from tests.support import RecordingSink
from tests.training_hooks.outputs.output_runs import by_step

pytestmark = [
    pytest.mark.trainer,
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"),
]


def make_hooks() -> list[TrainingHook]:
    return [OutputLogits(interval=1), TokenLoss(interval=1)]


@pytest.mark.slow
@pytest.mark.guarantee("attached-loops-keep-their-bytes")
@pytest.mark.parametrize("options", [{}, {"gradient_accumulation_steps": 2, "bf16": True}], ids=["plain", "bf16, 2"])
def test_trainer_of_hugging_face_is_measured_unchanged(tmp_path: Path, options: dict[str, Any]) -> None:
    """The traces are equal at every step.

    The Trainer divides the sum of the token losses by the labels, 12 in two rows of 6, of which 10 are predicted.
    """
    assert same(traced(tmp_path / "a", make_hooks(), **options), traced(tmp_path / "b", **options))
    made, sink = trainer(tmp_path / "c", dropout=0.0, kind=InOrder, **options), RecordingSink()
    attached(made, make_hooks(), sinks=[sink])
    made.train()
    losses = by_step(sink, "token_loss")
    assert len(losses) == (8 if options else ROWS)
    for metrics in losses.values():
        step_loss = metrics["mean"] + metrics["unexplained"]
        assert step_loss == pytest.approx(metrics["mean"] * 10 / 12, rel=2e-3 if options else 1e-5)
    assert all(metrics["tokens"] % 10 == 0 for metrics in losses.values())  # two rows of five predicted tokens
    assert all(math.isfinite(metrics["calibration_error"]) for metrics in by_step(sink, "output_logits").values())


@pytest.mark.slow
def test_label_smoothing_of_the_trainer_is_unexplained(tmp_path: Path) -> None:
    """The Trainer takes the labels from the model's arguments; they are found in the batch, and shifted."""
    made, sink = trainer(tmp_path, dropout=0.0, kind=InOrder, label_smoothing_factor=0.2), RecordingSink()
    attached(made, [TokenLoss(interval=1)], sinks=[sink])
    made.train()
    first = by_step(sink, "token_loss")[1]
    assert first["tokens"] == 10
    smoothed = first["mean"] + first["unexplained"]  # divided by 12 labels, of which 10 are predicted
    assert smoothed * 12 / 10 == pytest.approx(first["mean"], rel=0.1)
    assert smoothed * 12 / 10 != pytest.approx(first["mean"], rel=1e-4)
