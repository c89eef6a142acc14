"""Smoothing and averages on XLA against the CPU; `make xla` builds the environment that these tests need."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from loopscope.training_hooks import ModelSmoother, SmoothingConfig
from loopscope.training_hooks.averaging.weight_average import Average
from torch import Tensor, nn

from tests.training_hooks.reloading import through_a_file

os.environ.setdefault("PJRT_DEVICE", "CPU")
torch_xla: Any = pytest.importorskip("torch_xla", reason="torch_xla is not installed: make xla tests what runs on XLA")
pytestmark = pytest.mark.xla

DEVICE = torch_xla.device()  # asked for before the first backward pass, when autograd counts the devices that there are
STEPS, EVERY = 12, 3
CONFIG = SmoothingConfig(update_interval=EVERY, alpha=0.3)
AfterStep = Callable[[int], object]


def made(device: Any) -> nn.Sequential:
    """Make a model with statistics, the same numbers on every device."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 1)).to(device)


def train(model: nn.Module, after_step: AfterStep, steps: range = range(1, STEPS + 1), device: Any = "cpu") -> None:
    """Train on batches that depend on the step alone."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in steps:
        rows = torch.randn(32, 8, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        nn.functional.mse_loss(model(rows.to(device)), rows.sum(1, keepdim=True).to(device)).backward()
        optimizer.step()
        after_step(step)
        if device != "cpu":
            torch_xla.sync()


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(found) == list(expected)
    for name, value in expected.items():
        torch.testing.assert_close(found[name].detach().cpu(), value.detach(), rtol=1e-6, atol=1e-6, msg=name)


def test_xla_smoothing_matches_cpu_and_compiles_once():
    """Buffers stay on the device, and later smoothings reuse the compiled graph."""
    import torch_xla.debug.metrics as metrics

    compiled: list[int] = []

    def smoothed(device: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        model = made(device)
        smoother = ModelSmoother(model, CONFIG)
        reports: list[bool] = []

        def after(step: int) -> None:
            reports.append(smoother.maybe_smooth(step))
            compiled.append((metrics.metric_data("CompileTime") or (0,))[0])

        train(model, after, device=device)
        assert sum(reports) == STEPS // EVERY
        return dict(model.named_parameters()), smoother.buffers

    expected = smoothed("cpu")
    compiled.clear()
    found = smoothed(DEVICE)
    assert {value.device.type for table in found for value in table.values()} == {"xla"}
    for ours, theirs in zip(found, expected, strict=True):
        assert_close(ours, theirs)
    # one graph for the step that comes first, one for those that follow, one for the smoothing
    assert compiled[EVERY] == compiled[-1] > 0


@pytest.mark.parametrize("decay", [1.0, 0.9])
def test_xla_averages_match_brute_force(decay: float):
    """Averages of weights and statistics equal the weighted sums of the states seen."""
    model, average = made(DEVICE), Average(decay)
    seen: list[dict[str, Tensor]] = []

    def after(step: int) -> None:
        average.sample(model, step)
        seen.append({name: value.cpu().double() for name, value in model.state_dict().items()})

    train(model, after, device=DEVICE)
    weights = torch.tensor([decay ** (STEPS - step) for step in range(1, STEPS + 1)], dtype=torch.float64)
    found = average.weights(model)
    assert "1.running_var" in found
    stacks = {name: torch.stack([state[name] for state in seen], dim=-1) for name in found}
    assert_close(found, {name: (stack @ weights / weights.sum()).float() for name, stack in stacks.items()})


def test_xla_smoother_and_average_resume_from_checkpoint():
    """Parameters, buffers and averages match the uninterrupted training."""
    middle = STEPS // 2 + 1

    def both(model: nn.Module) -> tuple[ModelSmoother, Average, AfterStep]:
        smoother, average = ModelSmoother(model, CONFIG), Average(0.9)
        return smoother, average, lambda step: (smoother.maybe_smooth(step), average.sample(model, step))

    whole = made(DEVICE)
    smoother, average, after = both(whole)
    train(whole, after, device=DEVICE)

    first = made(DEVICE)
    *parts, after = both(first)
    train(first, after, range(1, middle), DEVICE)
    saved = through_a_file([part.state_dict() for part in (first, *parts)])
    second = made(DEVICE)
    resumed, resumed_average, after = both(second)
    for part, state in zip((second, resumed, resumed_average), saved, strict=True):
        part.load_state_dict(state)
    resumed_average.fit(second)
    train(second, after, range(middle, STEPS + 1), DEVICE)
    assert_close(dict(second.named_parameters()), {name: p.cpu() for name, p in whole.named_parameters()})
    assert_close(resumed.buffers, {name: value.cpu() for name, value in smoother.buffers.items()})
    assert_close(resumed_average.weights(second), {n: v.cpu() for n, v in average.weights(whole).items()})


SHARDED = """
import json, sys
import numpy as np
import torch, torch_xla
import torch_xla.runtime as runtime
runtime.use_spmd()
import torch_xla.distributed.spmd as spmd
from loopscope.training_hooks import ModelSmoother
from tests.training_hooks.averaging.test_on_xla import CONFIG, DEVICE, made, train

count = runtime.global_runtime_device_count()
mesh = spmd.Mesh(np.arange(count), (count,), ("rows",))
model = made(DEVICE)
spmd.mark_sharding(model[0].weight, mesh, ("rows", None))
smoother = ModelSmoother(model, CONFIG)
train(model, smoother.maybe_smooth, device=DEVICE)
told = torch_xla._XLAC._get_xla_sharding_spec
live = dict(model.named_parameters())
json.dump({
    "devices": count,
    "shardings": {name: [told(live[name]), told(buffer)] for name, buffer in smoother.buffers.items()},
    "buffers": {name: buffer.detach().cpu().tolist() for name, buffer in smoother.buffers.items()},
}, open(sys.argv[1], "w"))
"""


def test_spmd_buffer_has_sharding_of_its_parameter(tmp_path: Path):
    """The values match smoothing on the CPU."""
    out = tmp_path / "found.json"
    environment = os.environ | {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "4"}
    subprocess.run([sys.executable, "-c", SHARDED, out], check=True, env=environment, timeout=300)
    found = json.loads(out.read_text())
    model = made("cpu")
    smoother = ModelSmoother(model, CONFIG)
    train(model, smoother.maybe_smooth)
    assert found["devices"] == 4
    assert all(live == buffer for live, buffer in found["shardings"].values())
    assert "devices=[4,1]" in found["shardings"]["0.weight"][1]
    assert_close({name: torch.tensor(value) for name, value in found["buffers"].items()}, smoother.buffers)
