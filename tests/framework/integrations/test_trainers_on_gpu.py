"""Trainers with fp16 and their own scalers, which need a GPU. No machine of the project has run these tests so far."""

from pathlib import Path

import pytest
import torch

from tests.framework.integrations.hf_trainers import misbehaving_hook, same, traced
from tests.framework.integrations.test_lightning import fit

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),
]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_float16_trainer_matches_run_without_hooks(tmp_path: Path, accumulate: int) -> None:
    """A float16 Trainer trains identically at every step, with and without gradient accumulation."""
    options = {"use_cpu": False, "fp16": True, "gradient_accumulation_steps": accumulate, "max_grad_norm": 0.1}
    with_hooks = traced(tmp_path / "a", ["norms", "hessian", misbehaving_hook()], **options)
    assert same(with_hooks, traced(tmp_path / "b", **options))


def test_float16_lightning_fit_matches_unhooked_fit(tmp_path: Path) -> None:
    """A Lightning fit with precision 16-mixed trains identically."""
    options = {"accelerator": "gpu", "devices": 1, "precision": "16-mixed", "gradient_clip_val": 0.1}
    with_hooks, _, _ = fit(tmp_path / "a", ["norms", misbehaving_hook()], **options)
    bare, _, _ = fit(tmp_path / "b", **options)
    assert with_hooks == bare
