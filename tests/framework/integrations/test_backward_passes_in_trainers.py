"""Descriptions of backward passes in Accelerate, Hugging Face's Trainer and Lightning."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision

from tests.framework.doctor.senses.loss_reader import LossReader, Passes
from tests.framework.integrations.custom_loops import Loop
from tests.framework.integrations.custom_loops import attached as in_custom_loop
from tests.framework.integrations.hf_trainers import VOCABULARY, traced
from tests.framework.integrations.test_lightning import fit

pytestmark = [
    pytest.mark.trainer,
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"),
]


@pytest.mark.slow
def test_trainer_of_transformers_divides_by_tokens(tmp_path: Path) -> None:
    passes: Passes = {}
    traced(tmp_path, [LossReader(passes)], gradient_accumulation_steps=2)
    assert {len(described) for described in (passes[1], passes[2])} == {2}
    first = passes[1][0]
    assert (first.reduction, first.is_divided_by_tensor, first.class_count) == ("sum", True, VOCABULARY)
    assert not any(one.leftover_gradients for described in passes.values() for one in described)


@pytest.mark.parametrize("scaled", [False, True])
def test_lightning_divides_by_micro_batches(tmp_path: Path, scaled: bool) -> None:
    """The factor of a loss scaler is left out."""
    passes: Passes = {}
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    options: dict[str, Any] = {"plugins": [MixedPrecision("16-mixed", "cpu", scaler)]} if scaled else {}
    fit(tmp_path, [LossReader(passes)], accumulate_grad_batches=2, **options)
    assert len(passes[1]) == 2
    assert {(one.reduction, one.divisor) for one in passes[1]} == {("mean", 2.0)}
    assert {one.is_float16 for one in passes[1]} == {scaled}


def test_accelerate_divides_by_micro_batches(tmp_path: Path) -> None:
    passes: Passes = {}
    in_custom_loop(Loop(accelerate=True, accumulate=2), tmp_path, [LossReader(passes)])
    assert {one.divisor for one in passes[1]} == {2.0}
