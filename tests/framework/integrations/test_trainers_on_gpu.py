"""What the trainers do only on a GPU: fp16 with their own scalers. No machine of the project has run these so far."""

from pathlib import Path

import pytest
import torch

from tests.framework.integrations.hf_trainers import same, traced, vandal
from tests.framework.integrations.test_lightning import fit

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),
]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_trainer_in_float16_trains_as_without_hooks_at_every_step(tmp_path: Path, accumulate: int) -> None:
    options = {"use_cpu": False, "fp16": True, "gradient_accumulation_steps": accumulate, "max_grad_norm": 0.1}
    with_hooks = traced(tmp_path / "a", ["norms", "hessian", vandal()], **options)
    assert same(with_hooks, traced(tmp_path / "b", **options))


def test_a_fit_in_float16_is_the_fit_without_hooks(tmp_path: Path) -> None:
    options = {"accelerator": "gpu", "devices": 1, "precision": "16-mixed", "gradient_clip_val": 0.1}
    with_hooks, _, _ = fit(tmp_path / "a", ["norms", vandal()], **options)
    bare, _, _ = fit(tmp_path / "b", **options)
    assert with_hooks == bare
