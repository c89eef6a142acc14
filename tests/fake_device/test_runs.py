"""Whole runs on the simulated accelerator: checkpoints, mixed precision, custom loops and a Trainer."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import loopscope
import pytest
import torch
from loopscope import accelerators
from loopscope.experiments.mod_arithmetic import ModArithmeticRunner
from loopscope.experiments.mod_arithmetic.runner import QUICK, ModArithmeticConfig
from loopscope.hooks import HookPoint
from loopscope.runs import RunOptions, Session
from loopscope.sinks import CSVSink, JSONLSink
from loopscope.state import RandomStreams, TrainingState, seed_everything, without_on_demand
from loopscope.training.profiler import start_peak_measurement
from torch import nn
from torch.amp import GradScaler
from torch.utils.data import DataLoader, TensorDataset

from tests.contracts.test_hooks import HEALTH
from tests.fake_device.device import on_fake_device
from tests.framework.checkpoints.crash_runs import outcome
from tests.framework.checkpoints.killed_sessions import kill
from tests.support import MODELS, OPTIMIZERS, ActingHook, Case, SpyHook, at, data_for, differences, mean_loss, train
from tests.support.cases import slow_unless

pytestmark = [pytest.mark.fake_device, pytest.mark.slow, pytest.mark.filterwarnings(f"ignore:{HEALTH}")]
DEVICE = "fake"
TINY = QUICK | {"train_size": 96, "test_size": 32, "embed_dim": 16, "ff_dim": 32, "epochs": 2}
QUIET = {"display": "none", "overwrite": True, "audit": True}


# Checkpoints


def session(folder: Path, **options: Any) -> Session:
    """Create a session of the experiment mod_arithmetic on the device, with hooks that have state."""
    config = ModArithmeticConfig(output_dir=folder, **TINY)
    hooks = ["norms", "model_smoothing", "path_length"]
    run_options = RunOptions(strategies=["stride"], hooks=hooks, checkpoint_every_steps=1, **options)
    return Session(ModArithmeticRunner(config, torch.device(DEVICE)), run_options, lambda: [CSVSink(), JSONLSink()])


@pytest.mark.slow
@pytest.mark.guarantee("resumed-runs-are-identical")
@on_fake_device
def test_resumed_run_has_bytes_of_whole_run(tmp_path):
    """The checkpoint, the weights, the rows of the sinks and the summary."""
    session(tmp_path / "whole").run()
    assert kill(session(tmp_path / "first"), 2, tmp_path / "first", tmp_path / "killed")
    assert outcome(tmp_path / "killed") != outcome(tmp_path / "whole")
    session(tmp_path / "killed", resume=True).run()
    assert outcome(tmp_path / "killed") == outcome(tmp_path / "whole")


# Random generators


@on_fake_device
def test_devices_generator_is_protected():
    """An observer's draws on the device change none of the run's, and its own are the same at every step of a rerun."""
    generator = accelerators.devices_in_use()
    assert generator == [torch.device(DEVICE, 0)]
    draws: list[list[float]] = []
    hook = at(SpyHook, HookPoint.POST_STEP)(lambda ctx: draws.append(torch.rand(2, device=DEVICE).tolist()) or {})
    case = Case("batchnorm_mlp")  # has dropout
    bare, *hooked = [train(case, hooks, audit=False, device=DEVICE) for hooks in ([], [hook], [hook])]
    for run in hooked:
        assert not any(differences(*pair) for pair in zip(bare.digests, run.digests, strict=True))
    assert draws[:3] == draws[3:]
    assert len({*map(tuple, draws)}) == 3


@on_fake_device
def test_devices_generator_belongs_to_the_state():
    """Digests contain it, and so do checkpoints, which contain every part of the state."""
    state = train(Case(), audit=False, device=DEVICE).state
    before = without_on_demand(state.digest())
    torch.rand(1, device=DEVICE)
    (changed,) = differences(before, without_on_demand(state.digest()))
    assert changed.startswith("generators/")


OPTIONAL = [("is_initialized",), ("current_device",), ("manual_seed",), ("manual_seed", "manual_seed_all")]


@pytest.mark.parametrize("missing", OPTIONAL, ids=str)
@on_fake_device
def test_backend_may_lack_optional_functions(missing):
    """Like statistics of memory, streams and events, which this backend never has."""
    for name in missing:
        delattr(torch.fake, name)
    assert not any(hasattr(torch.fake, name) for name in ("memory_allocated", "Stream", "Event", "synchronize"))
    draws = []
    for _ in range(2):
        accelerators.seed_generators(torch.device(DEVICE, 0), 5)
        draws.append(torch.rand(3, device=DEVICE))
    assert torch.equal(*draws)
    assert RandomStreams(1).save().accelerators
    assert start_peak_measurement() is None


# A custom loop


class Loop:
    """A custom training loop whose batches arrive on the host, with float16, gradient scaling and skipped steps."""

    def __init__(self, *, scaled: bool) -> None:
        seed_everything(3)
        self.model = MODELS["batchnorm_mlp"]().to(DEVICE)
        self.optimizer = OPTIMIZERS["adamw_foreach"](self.model.parameters())
        self.generator = torch.Generator().manual_seed(8)
        self.loader = DataLoader(TensorDataset(*data_for("batchnorm_mlp")), 7, shuffle=True, generator=self.generator)
        self.scaler = GradScaler(DEVICE, init_scale=2.0**17) if scaled else None
        self.digests: list[dict[str, int]] = []
        self.skipped = 0
        streams = RandomStreams(0, [self.generator])
        self.state = TrainingState(self.model, self.optimizer, streams, scaler=self.scaler)

    def loss(self, model: nn.Module, batch: Sequence[torch.Tensor]) -> torch.Tensor:
        with torch.autocast(DEVICE, torch.float16, enabled=self.scaler is not None):
            return mean_loss(model, [tensor.to(DEVICE) for tensor in batch])

    def train(self, scope: Any = None, epochs: int = 2) -> None:
        for _ in range(epochs):
            for batch in self.loader if scope is None else scope.batches(self.loader):
                loss = self.loss(self.model, batch)
                if scope is not None:
                    scope.backward(loss)
                else:
                    (loss if self.scaler is None else self.scaler.scale(loss)).backward()
                self.update()
                self.digests.append(without_on_demand(self.state.digest()))
                self.optimizer.zero_grad()
            if scope is not None:
                scope.epoch_end()

    def update(self) -> None:
        if self.scaler is None:
            self.optimizer.step()
            return
        scale = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.skipped += self.scaler.get_scale() < scale


def spoil(run_ctx: Any, model_ctx: Any) -> None:
    """Draw, train and zero the weights, all of which is rolled back."""
    torch.rand(5), torch.rand(5, device=DEVICE)
    if run_ctx.batch_data is not None:
        model_ctx.take_step()
    for weight in model_ctx.model.parameters():
        weight.data.zero_()


HOOKS = ["norms", "hessian", "gradient_noise_scale", "step_history", "what_if", "adam_dynamics"]


@pytest.mark.guarantee("attached-loops-keep-their-bytes")
@pytest.mark.parametrize(
    ("scaled", "guardian"),
    [
        pytest.param(scaled, guardian, marks=slow_unless(scaled and guardian is not None))
        for scaled in (False, True)
        for guardian in (None, "cpu")
    ],
)
@on_fake_device
def test_attached_loop_keeps_its_bytes(tmp_path, scaled, guardian):
    """Observers, measurements on captured batches and an intervention that damages the run."""
    bare = Loop(scaled=scaled)
    bare.train()
    attached = Loop(scaled=scaled)  # seeds all generators again
    hooks = [*HOOKS, at(ActingHook, HookPoint.POST_STEP, HookPoint.POST_EPOCH)(spoil)]
    options = QUIET | {"guardian_device": guardian, "scaler": attached.scaler, "loss": attached.loss}
    options |= {"loader": attached.loader}
    with loopscope.attach(attached.model, attached.optimizer, hooks=hooks, out=tmp_path, **options) as scope:
        attached.train(scope)
    assert len(bare.digests) == 6
    assert bare.skipped == attached.skipped
    assert (0 < bare.skipped < 6) == scaled
    for step, pair in enumerate(zip(bare.digests, attached.digests, strict=True), start=1):
        changed = [name for name in differences(*pair) if "_optimizer_step_p" not in name]  # ours are there
        assert not changed, (step, changed)
