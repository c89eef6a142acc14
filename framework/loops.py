"""The two training loops: the only place where hook points are fired."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from .data import Batch
from .errors import UnfitError
from .firing import GradientKeeper, HookManager
from .hooks import EPOCH_END, HookPoint
from .isolation import borrowed_for_evaluation
from .state import LoopState
from .training import (
    TrainingTask,
    advance,
    evaluations,
    forward_backward,
    is_skipped,
    step_by_metric,
    takes_closure,
    update,
)


class Progress(Protocol):
    """What a loop tells the display: one call per step, and one per evaluation with its numbers."""

    def step(self, loop: LoopState) -> None:
        """Note that a step is done."""

    def evaluated(self, loop: LoopState) -> None:
        """Note that an evaluation (in the epoch loop, an epoch) is done."""


class NoProgress:
    """Shows nothing."""

    def step(self, loop: LoopState) -> None:
        """Ignore a step."""

    def evaluated(self, loop: LoopState) -> None:
        """Ignore an evaluation."""


class Pauses(Protocol):
    """What may be done where nothing is half done: a checkpoint written, the run ended."""

    def pause(self, loop: LoopState, *, unit_ended: bool) -> None:
        """Called after every step, and in the epoch loop after every epoch; ``unit_ended``: what the loop counts."""


class NoPauses:
    """Does nothing."""

    def pause(self, loop: LoopState, *, unit_ended: bool) -> None:
        """Go on."""


def epoch_loop(
    task: TrainingTask,
    manager: HookManager,
    *,
    progress: Progress = NoProgress(),  # noqa: B008 - it has no state
    pauses: Pauses = NoPauses(),  # noqa: B008 - it has no state
) -> None:
    """Train for ``task.length`` epochs, or until ``task.should_stop``, from the loop state's epoch and step on."""
    manager.refuse_other_loop("epoch")
    loop, keeper, again = manager.state.loop, GradientKeeper(task, manager.hooks), _again(task, manager)
    while loop.epoch < task.length and not loop.stopped:
        first = loop.step - loop.epoch * len(task.loader)
        if first == 0:
            _begin_epoch(task, manager, loop)
            keeper.renew()
            manager.fire(HookPoint.PRE_EPOCH)
        for loop.batch_idx, batch in enumerate(task.loader.batches(loop.epoch, first), first):  # noqa: B020 - the place
            if loop.batch_idx == first:
                manager.hooks.see_first(batch)
            _training_step(task, manager, keeper, batch, again, step_scheduler=task.scheduler_interval == "step")
            progress.step(loop)
            _pause(manager, pauses, loop, unit_ended=False)
        _end_of_pass(task, loop)
        manager.dispatch.flush_steps(loop.epoch)
        if task.scheduler_interval == "epoch" and loop.skipped_steps < loop.step:
            advance(task, loop.epoch + 1)
        _finish_accumulation(loop)
        if _is_due(loop.epoch + 1, task.eval_every, task.length):
            evaluate(task, manager, loop)
        progress.evaluated(loop)
        manager.fire(HookPoint.POST_EPOCH)
        if _is_due(loop.epoch + 1, task.snapshot_every, task.length) or loop.stopped:
            _snapshot(manager)
        loop.epoch += 1
        _pause(manager, pauses, loop, unit_ended=True)


def step_loop(
    task: TrainingTask,
    manager: HookManager,
    *,
    progress: Progress = NoProgress(),  # noqa: B008 - it has no state
    pauses: Pauses = NoPauses(),  # noqa: B008 - it has no state
) -> None:
    """Train for ``task.length`` steps, or until ``task.should_stop``; ``loop.epoch`` counts passes over the data."""
    manager.refuse_other_loop("step")
    loop, keeper, again = manager.state.loop, GradientKeeper(task, manager.hooks), _again(task, manager)
    while loop.step < task.length and not loop.stopped:
        first = loop.step - loop.epoch * len(task.loader)
        for loop.batch_idx, batch in enumerate(task.loader.batches(loop.epoch, first), first):  # noqa: B020 - the same
            if loop.batch_idx == first:
                manager.hooks.see_first(batch)
            _training_step(task, manager, keeper, batch, again, step_scheduler=True)
            progress.step(loop)
            if loop.step % task.log_every == 0:
                keeper.renew()
            _after_step(task, manager, loop, progress)
            _pause(manager, pauses, loop, unit_ended=True)
            if loop.step >= task.length or loop.stopped:
                break
        else:
            _end_of_pass(task, loop)
            loop.epoch += 1
    _end_of_batches(loop)


def _after_step(task: TrainingTask, manager: HookManager, loop: LoopState, progress: Progress) -> None:
    """Do what the step loop does between steps."""
    if _is_due(loop.step, task.eval_every, task.length):
        evaluate(task, manager, loop)
        progress.evaluated(loop)
    last = loop.stopped or loop.step == task.length
    if loop.step % task.log_every == 0 or last:
        _finish_accumulation(loop)
        manager.dispatch.flush_steps(loop.epoch)
    if loop.step % task.snapshot_every == 0 or last:
        _snapshot(manager)
        loop.series_steps = 0


def _pause(manager: HookManager, pauses: Pauses, loop: LoopState, *, unit_ended: bool) -> None:
    """Let others act between two steps; then end the run if a hook raised during the step."""
    pauses.pause(loop, unit_ended=unit_ended)
    manager.hooks.failures.raise_pending()


def _snapshot(manager: HookManager) -> None:
    manager.fire(HookPoint.SNAPSHOT)
    manager.dispatch.snapshot(manager.state.loop.epoch, manager.state.loop.step)


Again = Callable[[], AbstractContextManager[None]]


def _again(task: TrainingTask, manager: HookManager) -> Again | None:
    """Return the context of a step's further evaluations, if the optimizer makes several: no tap hears them."""
    return manager.deaf if takes_closure(task.optimizer) else None


def _training_step(
    task: TrainingTask,
    manager: HookManager,
    keeper: GradientKeeper,
    batch: Batch,
    again: Again | None,
    *,
    step_scheduler: bool,
) -> None:
    """Take one optimizer step and fire its four points; a step that is skipped has but two of them."""
    loop = manager.state.loop
    loop.step += 1
    loop.batch, loop.loss = batch, None
    loop.prev_step_grads, loop.current_grads = loop.current_grads, None
    manager.fire(HookPoint.PRE_STEP)
    loop.loss_scale = None if task.scaler is None else task.scaler.get_scale()
    loss = forward_backward(task, batch)
    skipped = is_skipped(task)
    loop.loss = loss
    loop.running_loss = loss.clone() if loop.running_loss is None else loop.running_loss.add_(loss)
    loop.running_steps += 1
    keeper.gather(loop, skipped=skipped)
    manager.fire(HookPoint.POST_BACKWARD)
    if not skipped:
        manager.fire(HookPoint.PRE_UPDATE)
        rate: float | torch.Tensor = task.optimizer.param_groups[0]["lr"]  # a tensor is what schedulers write to
        loop.step_lr = rate.clone() if isinstance(rate, torch.Tensor) else rate
    closure = None if again is None else evaluations(task, batch, loss, again)
    update(task, step_scheduler=step_scheduler, skipped=skipped, closure=closure, count=loop.step)
    if skipped:
        loop.skipped_steps += 1
    else:
        manager.fire(HookPoint.POST_STEP)


def _begin_epoch(task: TrainingTask, manager: HookManager, loop: LoopState) -> None:
    """Clear the accumulators of the epoch and, if a hook will ask for it, copy the state it starts from."""
    loop.running_loss, loop.running_steps = None, 0
    loop.gradient_sum, loop.gradient_steps, loop.accumulated_grads = None, 0, None
    loop.series_steps = 0
    # The run may end at an evaluation, and a run that ends takes a snapshot.
    snapshot = any(_is_due(loop.epoch + 1, every, task.length) for every in (task.eval_every, task.snapshot_every))
    points = EPOCH_END if snapshot else EPOCH_END[:1]
    loop.pre_epoch = None
    if manager.hooks.listeners.wants("needs_pre_epoch_state", points, loop.epoch):
        loop.pre_epoch = manager.pre_epoch_snapshot
        loop.pre_epoch.save(manager.state)


def _end_of_batches(loop: LoopState) -> None:
    """Forget the batch in flight: what comes next is between steps."""
    loop.batch, loop.batch_idx, loop.loss = None, None, None


def _end_of_pass(task: TrainingTask, loop: LoopState) -> None:
    """Forget the batch; raise :class:`UnfitError` for a loader that yields more or fewer batches than it says."""
    said, missing = len(task.loader), (loop.epoch + 1) * len(task.loader) - loop.step
    if missing:
        kind = type(task.loader).__name__
        raise UnfitError(f"{kind} yielded {said - missing} batches in epoch {loop.epoch}, but its length is {said}.")
    _end_of_batches(loop)


def _finish_accumulation(loop: LoopState) -> None:
    """Turn the running sums into means: the loss of the epoch (or since the last flush), the mean gradient."""
    if loop.running_loss is not None:
        loop.epoch_loss = float(loop.running_loss) / loop.running_steps
        loop.running_loss, loop.running_steps = None, 0
    if loop.gradient_sum is not None:
        with torch.no_grad():
            torch._foreach_div_(list(loop.gradient_sum.values()), loop.gradient_steps)
        loop.accumulated_grads, loop.gradient_sum, loop.gradient_steps = loop.gradient_sum, None, 0


def evaluate(task: TrainingTask, manager: HookManager, loop: LoopState) -> None:
    """Evaluate in eval mode, isolated from the run; step a scheduler that waits for it, and decide whether to stop."""

    def in_eval_mode() -> dict[str, float]:
        with borrowed_for_evaluation(task.model):
            return task.evaluate(task.model)

    loop.evaluation = manager.isolated("evaluation", in_eval_mode)
    loop.evaluated_at = loop.step
    step_by_metric(task, loop.evaluation)
    if task.should_stop(loop.evaluation):
        loop.stopped = True
        loop.reached = {"epoch": loop.epoch, "step": loop.step}


def _is_due(count: int, every: int, length: int) -> bool:
    return bool(every) and (count % every == 0 or count == length)
