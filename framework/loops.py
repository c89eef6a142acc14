"""The epoch loop and the step loop of experiments, between the transitions of a :class:`.Driver`."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

from .data import Batch
from .engine import Driver, HookManager
from .errors import InvalidExperimentError
from .state import LoopState
from .training import (
    DATA,
    EVALUATION,
    OTHER,
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
    """Progress reports of a loop to the display: one call per step and one per evaluation."""

    def step(self, loop: LoopState) -> None:
        """Report the end of a step."""

    def report_evaluation(self, loop: LoopState) -> None:
        """Report the end of an evaluation, or in the epoch loop of an epoch."""


class NoProgress:
    """A display that ignores all reports."""

    def step(self, loop: LoopState) -> None:
        """Ignore a step."""

    def report_evaluation(self, loop: LoopState) -> None:
        """Ignore an evaluation."""


class Pauses(Protocol):
    """Actions allowed only between steps: writing a checkpoint, or ending the run."""

    def pause(self, loop: LoopState, *, unit_ended: bool) -> None:
        """Act between steps: after every step, and in the epoch loop after every epoch.

        ``unit_ended`` says whether a unit of the loop (an epoch or a step) has ended.
        """


class NoPauses:
    """No actions between steps."""

    def pause(self, loop: LoopState, *, unit_ended: bool) -> None:
        """Do nothing."""


def epoch_loop(
    task: TrainingTask,
    manager: HookManager,
    *,
    progress: Progress = NoProgress(),  # noqa: B008 - it has no state
    pauses: Pauses = NoPauses(),  # noqa: B008 - it has no state
) -> None:
    """Train for ``task.length`` epochs, or until ``task.should_stop``, from the epoch and step of the loop state."""
    manager.check_loop("epoch")
    loop, driver, extra_evaluation = manager.state.loop, Driver(task, manager), _extra_evaluations(task, manager)
    while loop.epoch < task.length and not loop.stopped:
        first = loop.step - loop.epoch * len(task.loader)
        if first == 0:
            # An evaluation may end the run, and a run ends with a snapshot.
            intervals = (task.eval_every, task.snapshot_every)
            driver.begin_epoch(snapshot_follows=any(_is_due(loop.epoch + 1, every, task.length) for every in intervals))
        driver.clock.enter(DATA)
        for index, batch in enumerate(task.loader.batches(loop.epoch, first), first):
            _training_step(driver, batch, index, extra_evaluation, step_scheduler=task.scheduler_interval == "step")
            progress.step(loop)
            pauses.pause(loop, unit_ended=False)
            manager.raise_failures()
            driver.clock.enter(DATA)
        driver.clock.enter(OTHER)
        _check_length(task, loop)
        driver.end_batches()
        driver.end_interval()
        if task.scheduler_interval == "epoch" and loop.skipped_steps < loop.step:
            advance_scheduler(task, loop.epoch + 1)
        if _is_due(loop.epoch + 1, task.eval_every, task.length):
            evaluate(driver)
        progress.report_evaluation(loop)
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
    loop, driver, extra_evaluation = manager.state.loop, Driver(task, manager), _extra_evaluations(task, manager)
    if loop.step == 0:
        driver.begin_interval()
    while loop.step < task.length and not loop.stopped:
        first = loop.step - loop.epoch * len(task.loader)
        driver.clock.enter(DATA)
        for index, batch in enumerate(task.loader.batches(loop.epoch, first), first):
            _training_step(driver, batch, index, extra_evaluation, step_scheduler=True)
            progress.step(loop)
            _after_step(driver, progress)
            pauses.pause(loop, unit_ended=True)
            manager.raise_failures()
            if loop.step >= task.length or loop.stopped:
                break
            driver.clock.enter(DATA)
        else:
            _check_length(task, loop)
            driver.end_batches()
            loop.epoch += 1
    driver.end_batches()


def _after_step(driver: Driver, progress: Progress) -> None:
    """Evaluate, deliver metrics and take snapshots of the step loop as they are due."""
    task, loop = driver.task, driver.loop
    if _is_due(loop.step, task.eval_every, task.length):
        evaluate(driver)
        progress.report_evaluation(loop)
    last = loop.stopped or loop.step == task.length
    if loop.step % task.snapshot_every == 0 or last:
        driver.end_interval()
        driver.snapshot()
        driver.begin_interval()
    elif loop.step % task.log_every == 0:
        driver.flush_steps()


ExtraEvaluation = Callable[[], AbstractContextManager[None]]


def _extra_evaluations(task: TrainingTask, manager: HookManager) -> ExtraEvaluation | None:
    """Return a context without taps for extra loss evaluations of a step, if the optimizer takes a closure."""
    return manager.untapped_pass if takes_closure(task.optimizer) else None


def _training_step(
    driver: Driver, batch: Batch, index: int, extra_evaluation: ExtraEvaluation | None, *, step_scheduler: bool
) -> None:
    """Take one optimizer step on a batch."""
    task = driver.task
    driver.begin_step(batch, index)
    loss = forward_backward(task, batch, trains=True, before_backward=driver.backward_callback, clock=driver.clock)
    skipped = task.scaler is not None and is_skipped(task)
    driver.after_backward(loss, skipped=skipped)
    if not skipped:
        driver.before_update()
    closure = None if extra_evaluation is None else make_closure(task, batch, loss, extra_evaluation, trains=True)
    update(task, step_scheduler=step_scheduler, skipped=skipped, closure=closure, count=driver.loop.step)
    driver.after_update(skipped=skipped)


def _check_length(task: TrainingTask, loop: LoopState) -> None:
    """Raise :class:`InvalidExperimentError` if the loader yields more or fewer batches than its length."""
    length, missing = len(task.loader), (loop.epoch + 1) * len(task.loader) - loop.step
    if missing:
        kind = type(task.loader).__name__
        raise InvalidExperimentError(
            f"{kind} yielded {length - missing} batches in epoch {loop.epoch}, but its length is {length}."
        )


def evaluate(driver: Driver) -> None:
    """Evaluate, step a scheduler that needs the evaluation, and decide whether to stop."""
    task, loop = driver.task, driver.loop
    with driver.clock.during(EVALUATION):
        driver.evaluate()
    step_by_metric(task, loop.evaluation)
    if task.ranks.agree(task.should_stop(loop.evaluation)):
        loop.stopped = True
        loop.reached = {"epoch": loop.epoch, "step": loop.step}


def _is_due(count: int, every: int, length: int) -> bool:
    return bool(every) and (count % every == 0 or count == length)
