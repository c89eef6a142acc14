"""One optimizer step: zero_grad, forward and backward over the micro-batches, then the update."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from framework.batches import micro_batches, rows
from framework.data import Batch, Loader


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
    scheduler_interval: str = "epoch"
    """When the scheduler steps in the epoch loop: every ``epoch`` or every ``step``; in the step loop, every step."""
    length: int = 1
    """Epochs of the epoch loop, steps of the step loop."""
    eval_every: int = 1
    snapshot_every: int = 10
    checkpoint_every: int = 0
    log_every: int = 100
    accumulation_steps: int = 1
    config: Any = None


def forward_backward(task: TrainingTask, batch: Batch) -> Tensor:
    """Compute the gradients of the batch's mean loss and return that loss, detached.

    With ``accumulation_steps`` the batch is split into micro-batches, each weighted by its share of the rows.
    """
    task.optimizer.zero_grad()
    if task.accumulation_steps == 1:
        loss = task.compute_loss(task.model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()
    pieces = micro_batches(batch, task.accumulation_steps)
    losses = []
    for piece in pieces:
        loss = task.compute_loss(task.model, piece) * (rows(piece) / rows(batch))
        loss.backward()  # type: ignore[no-untyped-call]
        losses.append(loss.detach())
    return torch.stack(losses).sum()


def update(task: TrainingTask, *, step_scheduler: bool) -> None:
    """Let the optimizer use the gradients."""
    task.optimizer.step()
    if step_scheduler and task.scheduler is not None:
        task.scheduler.step()
