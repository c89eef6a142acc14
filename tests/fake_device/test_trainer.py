"""Hugging Face's Trainer on the simulated accelerator."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.contracts.test_hooks import HEALTH
from tests.fake_device.device import on_fake_device

pytestmark = [
    pytest.mark.fake_device,
    pytest.mark.slow,
    pytest.mark.trainer,
    pytest.mark.filterwarnings(f"ignore:{HEALTH}", "ignore:Detected call of `lr_scheduler:UserWarning"),
]
DEVICE = "fake:0"


def trained(folder: Path, hooks: list[Any] | None) -> tuple[Any, Any]:
    """Train on the device; return the weights and moments of every step, and the next draw."""
    from accelerate.state import PartialState
    from transformers import TrainingArguments

    from tests.framework.integrations import hf_trainers

    class OnFakeDevice(TrainingArguments):
        """Arguments that place model and batches on the device, of which accelerate knows nothing."""

        @property
        def _setup_devices(self) -> torch.device:
            device = torch.device(DEVICE)
            if "distributed_state" not in vars(self):
                TrainingArguments._setup_devices.__get__(self)
                PartialState._shared_state["device"] = device
            return device

    original, hf_trainers.TrainingArguments = hf_trainers.TrainingArguments, OnFakeDevice
    try:
        return hf_trainers.traced(folder, hooks)
    finally:
        hf_trainers.TrainingArguments = original


@pytest.mark.guarantee("attached-loops-keep-their-bytes")
@on_fake_device
def test_trainer_keeps_its_bytes(tmp_path):
    """Weights and moments of every step, on a simulated accelerator, with an intervention that is rolled back."""
    from tests.framework.integrations.hf_trainers import misbehaving_hook, same

    bare = trained(tmp_path / "bare", None)
    hooked = trained(tmp_path / "hooked", ["norms", "hessian", misbehaving_hook()])
    assert {str(tensor.device) for step in bare[0] for tensor in step[:-1] if tensor.ndim} == {DEVICE}
    assert same(hooked, bare)
