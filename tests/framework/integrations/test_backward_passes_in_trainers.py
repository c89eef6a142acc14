"""Descriptions of backward passes in Accelerate, Hugging Face's Trainer and Lightning."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from loopscope.hooks import BackwardPass, HookPoint

from tests.framework.integrations.custom_loops import Loop
from tests.framework.integrations.custom_loops import attached as in_custom_loop
from tests.framework.integrations.hf_trainers import VOCABULARY, traced
from tests.framework.integrations.test_lightning import fit
from tests.support import SpyHook, at

pytestmark = [
    pytest.mark.trainer,
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"),
]


def reader(passes: list[tuple[BackwardPass, ...]]) -> SpyHook:
    """Return a hook that stores the descriptions of every step."""
    hook: SpyHook = at(SpyHook, HookPoint.POST_BACKWARD, needs_loss_graph=True)(
        lambda ctx: passes.append(ctx.backward_passes)
    )
    return hook


@pytest.mark.slow
def test_trainer_of_transformers_divides_by_tokens(tmp_path: Path) -> None:
    passes: list[tuple[BackwardPass, ...]] = []
    traced(tmp_path, [reader(passes)], gradient_accumulation_steps=2)
    assert {len(described) for described in passes[:2]} == {2}
    first = passes[0][0]
    assert (first.reduction, first.is_divided_by_tensor, first.class_count) == ("sum", True, VOCABULARY)
    assert not any(one.leftover_gradients for described in passes for one in described)


@pytest.mark.parametrize("scaled", [False, True])
def test_lightning_divides_by_micro_batches(tmp_path: Path, scaled: bool) -> None:
    """The factor of a loss scaler is left out."""
    passes: list[tuple[BackwardPass, ...]] = []
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    options: dict[str, Any] = {"plugins": [MixedPrecision("16-mixed", "cpu", scaler)]} if scaled else {}
    fit(tmp_path, [reader(passes)], accumulate_grad_batches=2, **options)
    assert len(passes[0]) == 2
    assert {(one.reduction, one.divisor) for one in passes[0]} == {("mean", 2.0)}
    assert {one.is_float16 for one in passes[0]} == {scaled}


def test_accelerate_divides_by_micro_batches(tmp_path: Path) -> None:
    passes: list[tuple[BackwardPass, ...]] = []
    in_custom_loop(Loop(accelerate=True, accumulate=2), tmp_path, [reader(passes)])
    assert {one.divisor for one in passes[0]} == {2.0}
