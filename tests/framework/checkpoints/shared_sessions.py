"""A float64 experiment that several processes train, stop and resume, in any number and ``--parallel`` mode."""

import shutil
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from loopscope import HookPoint, TrainingHook, training_hooks
from loopscope.checkpoints import Checkpointing, StoppedError
from loopscope.hooks import EVERY_STEP
from loopscope.runs import RunOptions, Session
from loopscope.sinks import JSONLSink
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from tests.framework.checkpoints.crash_runs import patiently
from tests.framework.runs.small_experiment import Small, SmallConfig, registered

assert training_hooks.__all__
STOPPED_AT = 4
HOOKS = (
    *("training_metrics", "training_diagnostics", "norms", "variance", "path_length", "batch_dynamics"),
    *("weight_average", "weight_updates", "consecutive", "parameter_delta", "model_smoothing", "counterfactual"),
)
OPTIONS = {"variance": {"window": 2, "every": 2}, "model_smoothing": {"update_interval": 2}}


class Net(nn.Module):
    """Two layers that tensor parallelism splits, after a layer that it does not split."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(4), nn.Linear(4, 12), nn.Linear(12, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.gelu(self.up(self.norm(x))))


class Shared(Small):
    """Small in float64 without random layers, with parameter groups that tensor parallelism has to split."""

    name = "shared"

    def build_model(self) -> nn.Module:
        return Net().double()

    def data(self) -> tuple[Tensor, Tensor]:
        inputs, classes = super().data()
        return inputs.double(), classes

    def tensor_parallel_plan(self, model: nn.Module) -> Mapping[str, Any]:
        return {"up": ColwiseParallel(), "down": RowwiseParallel()}

    def build_optimizer(self, model: nn.Module) -> AdamW:
        weights = [parameter for parameter in model.parameters() if parameter.ndim > 1]
        others = [parameter for parameter in model.parameters() if parameter.ndim == 1]
        return AdamW([{"params": weights, "weight_decay": 0.1}, {"params": others}], lr=self.config.lr, fused=True)

    def build_scheduler(self, optimizer: Any) -> LambdaLR:
        return LambdaLR(optimizer, [lambda epoch: 0.9**epoch, lambda epoch: 0.8**epoch])


class Stop(TrainingHook):
    """Sends SIGTERM to the first rank, which ends the run after a step with a checkpoint."""

    name = "stop"
    hook_points = frozenset({HookPoint.POST_STEP})
    step_schedule = EVERY_STEP

    def __init__(self, *, at: int = STOPPED_AT) -> None:
        self._at = at

    def describe_metrics(self) -> list[Any]:
        return []

    def compute(self, ctx: Any) -> dict[str, Any]:
        if ctx.step == self._at and (not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0):
            signal.raise_signal(signal.SIGTERM)
        return {}


def train(folder: Path, kind: Any, hooks: Sequence[str] = HOOKS, lr: float = 0.01, **options: Any) -> None:
    """Train or resume in a folder with the current processes."""
    options_of = {name: options for name, options in OPTIONS.items() if name in hooks}
    with registered(Shared, Stop):
        given = RunOptions(
            strategies=["plain"],
            parallel=kind,
            hooks=hooks,
            hook_options=options_of,
            checkpoint_every_steps=2,
            **options,
        )
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Checkpointing, "take", patiently(Checkpointing.take))  # none is skipped for lack of time
            Session(Shared(SmallConfig(output_dir=folder, epochs=3, lr=lr)), given, lambda: [JSONLSink()]).run()


def stop(folder: Path, kind: Any) -> None:
    """Train until a signal stops the run."""
    with pytest.raises(StoppedError, match="SIGTERM"):
        train(folder, kind, (*HOOKS, "stop"))


def resume(stopped_run: Path, folder: Path, kind: Any, **options: Any) -> None:
    """Resume in a copy of the folder of a stopped run."""
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        shutil.copytree(stopped_run, folder)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    train(folder, kind, resume=True, **options)
