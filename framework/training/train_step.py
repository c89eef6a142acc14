"""One optimizer step: zero_grad, forward and backward over the micro-batches, then the update; mixed precision."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any, Literal, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ..data import Batch, Loader, micro_batches, rows

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Precision:
    """What forward passes compute in: the parameters' own precision (``None``), or a lower one where that is safe."""

    dtype: torch.dtype | None
    device_type: str

    @classmethod
    def of(cls, amp: Literal["none", "bf16", "fp16"], device: torch.device) -> "Precision":
        """Return the precision that the option ``amp`` asks for."""
        return cls({"bf16": torch.bfloat16, "fp16": torch.float16}.get(amp), device.type)

    def autocast(self, function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
        """Return the function under autocast, or itself where there is none."""
        if self.dtype is None:
            return function

        @wraps(function)
        def cast(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
            with torch.autocast(self.device_type, self.dtype):
                return function(*args, **kwargs)

        return cast

    def scaler(self) -> GradScaler | None:
        """Return a new scaler for float16, whose small gradients are zero otherwise; no other precision needs one."""
        return GradScaler(self.device_type) if self.dtype is torch.float16 else None


@dataclass
class TrainingTask:
    """What is trained, on what, by what: everything a training loop needs to know of an experiment.

    ``compute_loss(model, batch)`` returns the mean loss of the batch; ``evaluate(model)`` returns named numbers and
    is called in eval mode without gradients; ``should_stop(evaluation)`` ends the run early.
    """

    model: nn.Module
    optimizer: Optimizer
    loader: Loader
    compute_loss: Callable[[nn.Module, Batch], Tensor]
    evaluate: Callable[[nn.Module], dict[str, float]] = lambda model: {}
    should_stop: Callable[[dict[str, float]], bool] = lambda evaluation: False
    target_grad: Callable[[nn.Module], dict[str, Tensor] | None] = lambda model: None
    scheduler: LRScheduler | None = None
    scaler: GradScaler | None = None
    """Scales the loss, for float16."""
    scheduler_interval: str = "epoch"
    """When the scheduler steps in the epoch loop: every ``epoch`` or every ``step``; in the step loop, every step."""
    length: int = 1
    """Epochs of the epoch loop, steps of the step loop."""
    eval_every: int = 1
    snapshot_every: int = 10
    log_every: int = 100
    accumulation_steps: int = 1
    config: Any = None


def forward_backward(task: TrainingTask, batch: Batch) -> Tensor:
    """Compute the gradients of the batch's mean loss, unscaled, and return that loss, detached.

    With ``accumulation_steps`` the batch is split into micro-batches, each weighted by its share of the rows.
    """
    task.optimizer.zero_grad()
    losses = []
    for piece in micro_batches(batch, task.accumulation_steps):
        loss = task.compute_loss(task.model, piece)
        if task.accumulation_steps > 1:
            loss = loss * (rows(piece) / rows(batch))
        scaled = loss if task.scaler is None else task.scaler.scale(loss)
        scaled.backward()  # type: ignore[no-untyped-call]
        losses.append(loss.detach())
        del loss, scaled  # or their graph would live on during the next forward pass
    if task.scaler is not None:
        task.scaler.unscale_(task.optimizer)
    return losses[0] if task.accumulation_steps == 1 else torch.stack(losses).sum()


def is_skipped(task: TrainingTask) -> bool:
    """Return whether this step's update has to be skipped: scaled too far, its gradients left float16."""
    if task.scaler is None:
        return False
    # what the scaler itself asks before a step; its public methods only say afterwards that the scale has shrunk
    return any(bool(found) for found in task.scaler._found_inf_per_device(task.optimizer).values())


def measure_gradients(task: TrainingTask, batch: Batch) -> None:
    """Compute the gradients for nobody's step: where they leave float16, again with the loss scaled less."""
    while True:
        forward_backward(task, batch)
        if task.scaler is None:
            return
        skipped = is_skipped(task)
        task.scaler.update()
        if not skipped or task.scaler.get_scale() < 1:
            return


def update(task: TrainingTask, *, step_scheduler: bool, skipped: bool = False) -> None:
    """Let the optimizer use the gradients; a ``skipped`` step only lowers the scale of the loss."""
    if task.scaler is None:
        task.optimizer.step()
    else:
        if not skipped:
            task.scaler.step(task.optimizer)
        task.scaler.update()
    if step_scheduler and not skipped and task.scheduler is not None:
        task.scheduler.step()


@contextmanager
def borrowed_scaler(task: TrainingTask) -> Iterator[None]:
    """Let the body scale its losses by a twin of the task's scaler, which may itself be in the middle of a step."""
    scaler = task.scaler
    try:
        if scaler is not None and scaler.is_enabled():
            task.scaler = GradScaler(scaler._device)  # no public name tells its device
            task.scaler.load_state_dict(scaler.state_dict())
        yield
    finally:
        task.scaler = scaler
