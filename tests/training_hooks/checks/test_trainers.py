"""The hook training_checks in trainers and on models of transformers."""

import math
from pathlib import Path
from typing import Any

import pytest

from tests.framework.integrations.hf_trainers import VOCABULARY, attached, trainer
from tests.framework.integrations.test_lightning import fit

pytestmark = [
    pytest.mark.trainer,
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"),
]
Metrics = dict[str, Any]


def of_checks(scope: Any) -> Metrics:
    """Return the latest metrics of the hook."""
    prefix = "training_checks/"
    return {name.removeprefix(prefix): float(value) for name, value in scope.last_metrics().items()
            if name.startswith(prefix)}  # fmt: skip


@pytest.mark.slow
def test_trainer_of_transformers_is_sound(tmp_path: Path) -> None:
    made = trainer(tmp_path, gradient_accumulation_steps=2, max_grad_norm=0.1)
    scope = attached(made, ["training_checks"])
    made.train()
    metrics = of_checks(scope)
    zeros = (
        "loss_is_summed",
        "doubly_normalised",
        "without_gradient_count",
        "leftover_gradient_count",
        "lost_gradient_fraction",
        "model_in_eval",
    )
    assert {name: metrics[name] for name in zeros} == dict.fromkeys(zeros, 0)
    assert (metrics["micro_batches"], metrics["averages_micro_batches"]) == (2, 1)
    assert metrics["uniform_loss"] == math.log(VOCABULARY)
    assert 0 < metrics["clip_factor"] < 1
    assert metrics["target_class_count"] > 1


def test_lightning_is_sound(tmp_path: Path) -> None:
    _, scope, _ = fit(tmp_path, ["training_checks"], accumulate_grad_batches=2)
    metrics = of_checks(scope)
    assert (metrics["micro_batches"], metrics["averages_micro_batches"], metrics["loss_divisor"]) == (2, 1, 2)
    assert metrics["class_count"] == 7
    assert metrics["update_ratio"] > 0
    assert metrics["lost_gradient_fraction"] == 0
