"""The two training loops of experiments: what lies between the transitions of a :class:`.Driver`."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

from .data import Batch
from .errors import InvalidExperimentError
from .firing import Driver, HookManager
from .state import LoopState
from .training import (
    TrainingTask,
    advance_scheduler,
    forward_backward,
    is_skipped,
    make_closure,
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
    manager.check_loop("epoch")
    loop, driver, again = manager.state.loop, Driver(task, manager), _again(task, manager)
    while loop.epoch < task.length and not loop.stopped:
        first = loop.step - loop.epoch * len(task.loader)
        if first == 0:
            # The run may end at an evaluation, and a run that ends takes a snapshot.
            ends = (task.eval_every, task.snapshot_every)
            driver.begin_epoch(takes_snapshot=any(_is_due(loop.epoch + 1, every, task.length) for every in ends))
        for index, batch in enumerate(task.loader.batches(loop.epoch, first), first):
            _training_step(driver, batch, index, again, step_scheduler=task.scheduler_interval == "step")
            progress.step(loop)
            pauses.pause(loop, unit_ended=False)
            manager.raise_failures()
        _check_length(task, loop)
        driver.end_batches()
        driver.end_interval()
        if task.scheduler_interval == "epoch" and loop.skipped_steps < loop.step:
            advance_scheduler(task, loop.epoch + 1)
        if _is_due(loop.epoch + 1, task.eval_every, task.length):
            evaluate(driver)
        progress.evaluated(loop)
        driver.end_epoch()
        if _is_due(loop.epoch + 1, task.snapshot_every, task.length) or loop.stopped:
            driver.snapshot()
        loop.epoch += 1
        pauses.pause(loop, unit_ended=True)
        manager.raise_failures()


def step_loop(
    task: TrainingTask,
    manager: HookManager,
    *,
    progress: Progress = NoProgress(),  # noqa: B008 - it has no state
    pauses: Pauses = NoPauses(),  # noqa: B008 - it has no state
) -> None:
    """Train for ``task.length`` steps, or until ``task.should_stop``; ``loop.epoch`` counts passes over the data."""
    manager.check_loop("step")
    loop, driver, again = manager.state.loop, Driver(task, manager), _again(task, manager)
    while loop.step < task.length and not loop.stopped:
        first = loop.step - loop.epoch * len(task.loader)
        for index, batch in enumerate(task.loader.batches(loop.epoch, first), first):
            _training_step(driver, batch, index, again, step_scheduler=True)
            progress.step(loop)
            _after_step(driver, progress)
            pauses.pause(loop, unit_ended=True)
            manager.raise_failures()
            if loop.step >= task.length or loop.stopped:
                break
        else:
            _check_length(task, loop)
            driver.end_batches()
            loop.epoch += 1
    driver.end_batches()


def _after_step(driver: Driver, progress: Progress) -> None:
    """Do what the step loop does between steps."""
    task, loop = driver.task, driver.loop
    if _is_due(loop.step, task.eval_every, task.length):
        evaluate(driver)
        progress.evaluated(loop)
    last = loop.stopped or loop.step == task.length
    if loop.step % task.log_every == 0 or last:
        driver.end_interval()
    if loop.step % task.snapshot_every == 0 or last:
        driver.snapshot()


Again = Callable[[], AbstractContextManager[None]]


def _again(task: TrainingTask, manager: HookManager) -> Again | None:
    """Return the context of a step's further evaluations, if the optimizer makes several: no tap hears them."""
    return manager.untapped_pass if takes_closure(task.optimizer) else None


def _training_step(driver: Driver, batch: Batch, index: int, again: Again | None, *, step_scheduler: bool) -> None:
    """Take one optimizer step on a batch."""
    task = driver.task
    driver.begin_step(batch, index)
    loss = forward_backward(task, batch, trains=True)
    skipped = task.scaler is not None and is_skipped(task)
    driver.after_backward(loss, skipped=skipped)
    if not skipped:
        driver.before_update()
    closure = None if again is None else make_closure(task, batch, loss, again, trains=True)
    update(task, step_scheduler=step_scheduler, skipped=skipped, closure=closure, count=driver.loop.step)
    driver.after_update(skipped=skipped)


def _check_length(task: TrainingTask, loop: LoopState) -> None:
    """Raise :class:`InvalidExperimentError` for a loader that yields more or fewer batches than it says."""
    said, missing = len(task.loader), (loop.epoch + 1) * len(task.loader) - loop.step
    if missing:
        kind = type(task.loader).__name__
        raise InvalidExperimentError(
            f"{kind} yielded {said - missing} batches in epoch {loop.epoch}, but its length is {said}."
        )


def evaluate(driver: Driver) -> None:
    """Evaluate; step a scheduler that waits for it, and decide whether to stop."""
    task, loop = driver.task, driver.loop
    driver.evaluate()
    step_by_metric(task, loop.evaluation)
    if task.ranks.agree(task.should_stop(loop.evaluation)):
        loop.stopped = True
        loop.reached = {"epoch": loop.epoch, "step": loop.step}


def _is_due(count: int, every: int, length: int) -> bool:
    return bool(every) and (count % every == 0 or count == length)
