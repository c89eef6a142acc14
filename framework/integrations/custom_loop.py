"""Translation of a custom loop's calls into steps and epochs: which step is open, its progress, the end of an epoch."""

import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from types import FrameType
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..combined_optimizers import separate_optimizers
from ..data import Batch, MicroBatches
from ..doctor.senses import EvaluationModes
from ..errors import RunNotice, UsageError, notice, require, warn
from ..hooks import Alert, HookPoint
from ..state import Transient, uncompiled, visited
from .attached_loop import AttachedLoop, Result
from .forward_arguments import ForwardArguments
from .gradient_unscaling import unscaled_gradients
from .other_optimizers import OtherOptimizers

NO_ROWS: Batch = ()
"""The batch of a step whose forward pass was not seen."""
BARE_POINTS = frozenset({HookPoint.PRE_UPDATE, HookPoint.POST_STEP})
"""The hook points that work in a bare loop, which only calls optimizer.step()."""
ADVICE = "iterate over scope.batches(loader) and call scope.backward(loss) in place of loss.backward()"


class AcceleratorLike(Protocol):
    """The parts of an Accelerator that are used: the backward pass, and whether a step's gradients are complete."""

    sync_gradients: bool
    gradient_accumulation_steps: int

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Divide the loss by the number of micro-batches, scale it, and add its gradients."""


class HookCallSwitch:
    """Marks the time of hook calls, in which a call of the optimizer comes from a hook and not from the loop."""

    # A class, since it is entered several times per step and a generator-based context manager is slower.
    is_on = False

    def is_entered(self) -> bool:
        """Return whether a hook is being called."""
        return self.is_on

    def __enter__(self) -> None:
        self.is_on = True

    def __exit__(self, *error: object) -> None:
        self.is_on = False


class Closure:
    """The closure of a loop, which reports its evaluations."""

    def __init__(self, loop: "CustomLoop", function: Callable[[], Any]) -> None:
        self._loop, self._function = loop, function

    def __call__(self) -> Any:
        """Evaluate the closure, and return its result."""
        return self._loop.evaluate_closure(self._function)


class RunningStep(Transient):
    """The calls of one optimizer's ``step``, of which only the outermost is a step of the loop.

    torch wraps ``step`` in the class of every optimizer that is created. If a subclass calls ``super().step()``, and an
    optimizer of the base class exists, too, step hooks are called within its own step for a second time.
    """

    def __init__(self, loop: "CustomLoop", index: int, hook_calls: HookCallSwitch) -> None:
        """Report the steps of the optimizer with this ``index`` to the ``loop``, except those of hooks."""
        self._loop, self._index, self._hook_calls = loop, index, hook_calls
        self._depth = 0
        self._frame: FrameType | None = None

    # Registered as bound methods of a transient object, which are not watched; those of partial functions would be.

    @uncompiled  # in a compiled optimizer.step() and in a compiled step
    def enter(self, optimizer: Optimizer, inputs: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Note the start of a call, and report it if it is the outermost; a hook before the step."""
        if self._hook_calls.is_on:
            return
        frame = sys._getframe(1)  # that of torch's wrapper
        self._depth = self._depth + 1 if self._depth and self._is_running(frame) else 1  # an earlier one has raised
        if self._depth == 1:
            self._frame = frame
            self._loop.before_update(self._index, optimizer, inputs, options)

    @uncompiled
    def leave(self, optimizer: Optimizer, inputs: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Note the end of a call, and report it if it is the outermost; a hook after the step."""
        if self._hook_calls.is_on:
            return
        self._depth = max(0, self._depth - 1)
        if not self._depth:
            self._frame = None
            self._loop.after_update(self._index)

    def _is_running(self, frame: FrameType | None) -> bool:
        while frame is not None and frame is not self._frame:
            frame = frame.f_back
        return frame is not None


class CustomLoop(Transient):
    """Translates the calls of a loop, with ``accumulate`` micro-batches per step, into the transitions of a driver.

    In a loop of Accelerate, the ``accelerator`` runs backward and decides when a step is complete.
    """

    def __init__(
        self,
        attached: AttachedLoop,
        accumulate: int,
        accelerator: AcceleratorLike | None,
        called: nn.Module | None = None,
    ) -> None:
        """Observe the optimizers; a loop that calls the model itself gives ``called``, the model or its wrapper."""
        self._attached, self._accumulate, self._accelerator = attached, accumulate, accelerator
        self._driver = attached.driver
        self._optimizers: list[Optimizer] = separate_optimizers(attached.driver.task.optimizer)
        self._scaler = attached.driver.task.scaler
        self._parts = MicroBatches()
        self._losses: list[Tensor] = []
        self._index = self._first_index = 0  # of the step in the epoch
        self._is_open = self._is_complete = self._is_updating = False  # state of the step
        self._is_in_epoch = self._is_data_exhausted = False  # state of the epoch
        self._is_bare = self._has_deferred_work = False
        self._bare_points = BARE_POINTS
        self._has_checked_step = False
        self._has_ready_gradients = self._has_closures = False  # whether the loop has used these calls
        self._is_in_closure_step = self._is_in_backward = self._stepped_in_backward = False
        self._evaluations = 0
        """The evaluations of the closure in the step so far."""
        self._hook_calls = attached.hook_calls = HookCallSwitch()
        self._modes = EvaluationModes(
            attached.driver.task.model,
            attached.driver.loop,
            facts=attached.start_facts,
            is_in_hook=self._hook_calls.is_entered,
            report=attached.manager.report_about_evaluation,
            compiled=attached.driver.task.compiled,
        )
        self.arguments: ForwardArguments | None = None
        """Finds the batches, until the loop reports batches of tensors."""
        self._passed: Batch = NO_ROWS  # the arguments of the newest pass
        self._has_batches = self._opens_at_passes = False
        if called is not None:
            models = (attached.driver.task.model, called)
            self.arguments = ForwardArguments(models, self._receive_arguments, self._hook_calls.is_entered)
            self.arguments.arm()
        attached.is_in_step = self.is_in_step
        self._driver.can_cancel_steps = True
        self._warned: set[str] = set()
        self._stepped: set[int] = set()  # the positions of the optimizers that have made this step
        self._others = OtherOptimizers(
            self._driver.task.model, self._optimizers, self._hook_calls.is_entered, self._report_other_optimizer
        )
        steps = [RunningStep(self, index, self._hook_calls) for index, _ in enumerate(self._optimizers)]
        self._handles = [
            handle
            for optimizer, step in zip(self._optimizers, steps, strict=True)
            for handle in (optimizer.register_step_pre_hook(step.enter), optimizer.register_step_post_hook(step.leave))
        ]

    def micro_batch(self, batch: Batch, steps: int | None, *others: Batch) -> None:
        """Start a step with its first micro-batch, or continue it with the next one.

        ``steps`` is the number of steps per epoch; ``others`` are the step's remaining micro-batches, if available.
        """
        attached = self._attached
        if not attached.is_started:
            self._start(batch, steps)
        if self._stepped:
            self._end_partial_step()
        if self._is_complete:
            self._warn_once(
                "skipped",
                "A backward pass was not followed by optimizer.step(), so its step was counted as skipped; for "
                "gradient accumulation, give the number of backward passes per step to attach(..., accumulate=N). If "
                "the loop has created another optimizer, attach to that one.",
            )
            self._end_step(skipped=True)
            self._others.watch()
        if self._is_data_exhausted:
            self.end_epoch({})
        if self._has_deferred_work:
            self.run_deferred_work()
        if not self._is_in_epoch:
            self._is_in_epoch, self._index, self._first_index = True, self._first_index, 0
            attached.plan.begin_epoch(self._driver.loop.epoch, self._driver.loop.step - self._index, steps)
            if attached.manager.counts_epochs:  # in the step loop, sums continue across epochs
                with self._hook_calls:
                    self._driver.begin_epoch(snapshot_follows=True)
        del self._parts[len(self._losses) :]  # the loop has dropped a batch before its backward pass
        if self._is_open and not self._losses:
            self._cancel_step()
        self._parts += [batch, *others]
        if self._is_open:
            self._driver.loop.batch = self._batch
            return
        self._is_open = True
        with self._hook_calls:
            self._driver.begin_step(self._batch, self._index)

    def note_batch(self, batch: Batch) -> None:
        """Note a batch of the loop; one without tensors, such as an index, is replaced by the arguments of the pass.

        Not if ``loss=`` was given, which gets the loop's batch.
        """
        arguments, self._has_batches = self.arguments, True
        has_tensors = any(isinstance(value, (Tensor, np.ndarray)) for _, value, _ in visited("", batch))
        if arguments is not None and (has_tensors or "needs_loss" not in self._attached.lacks):
            arguments.disarm()
            self.arguments = None
        elif arguments is not None:
            arguments.arm()

    def _receive_arguments(self, batch: Batch) -> None:
        """Note the arguments of a pass of the model as the batch of the step, which they open unless it is open."""
        self._passed = batch
        if self._has_batches and len(self._parts) > len(self._losses):
            self._parts[-1] = batch
            self._driver.loop.batch = self._batch
        elif self._opens_at_passes and not self._is_complete:
            self._open_step()

    def _open_step(self) -> None:
        """Start a step, or its next micro-batch, on the arguments of the newest pass."""
        batch, self._passed = self._passed, NO_ROWS
        self.micro_batch(batch, None)

    def _cancel_step(self) -> None:
        """Forget a step whose batch the loop has dropped before its backward pass."""
        self._parts, self._losses, self._is_open = MicroBatches(), [], False
        with self._hook_calls:
            self._driver.cancel_step()

    def begin_at(self, epoch: int, step: int, index: int) -> None:
        """Continue the numbers of a training without hooks, whose next step is the ``index``-th of its epoch."""
        self._attached.begin_at(epoch, step)
        if not self._attached.place:  # a loaded state has the position
            self._first_index = index

    def _start(self, batch: Batch | None, steps: int | None) -> None:
        with self._hook_calls:
            self._attached.start(batch, steps, self.close)
        self._is_in_epoch, self._is_data_exhausted, self._index = self._attached.place.get("loop", (False, False, 0))
        # The state may have been saved within the loop body after the last step of an epoch.
        is_last = self._index == self._attached.plan.steps
        self._is_data_exhausted = self._is_data_exhausted or (self._is_in_epoch and is_last)

    def start_without_steps(self) -> None:
        """Start a resumed run whose training has no step left, so that its record is completed all the same."""
        if self._attached.place and not self._attached.is_started:
            self._start(None, None)

    @property
    def _has_no_step_left(self) -> bool:
        """Whether the run has not started, and its loaded state was saved after the last step of an epoch."""
        if self._attached.is_started or not self._attached.place:
            return False
        is_in_epoch, is_data_exhausted, index = self._attached.place["loop"]
        return not is_in_epoch or is_data_exhausted or index == self._attached.place["plan"]["steps"]

    def end_of_data(self, steps: int | None) -> None:
        """Note the end of an epoch's data; the epoch ends at the start of the next one, or at ``epoch_end``."""
        if self._attached.place and not self._attached.is_started:  # resumed in an epoch without remaining batches
            self._start(None, steps)
        self._is_data_exhausted = self._is_in_epoch
        if self._is_in_epoch:
            self._modes.end_data()

    def report_no_batches(self) -> None:
        """Report a loader that yielded no batch in a pass over it."""
        self._warn_once(
            "no batches",
            "scope.batches(loader) got no batch: the loader is empty, or an iterator that an earlier epoch has used "
            "up; give a DataLoader or a list, or create the iterator again for every epoch.",
        )

    def next_position(self) -> tuple[int, int]:
        """Return the epoch and the index of the micro-batch with which the next pass over the data starts."""
        attached = self._attached
        if attached.is_started or not attached.place:
            return self._driver.loop.epoch + self._is_in_epoch, 0
        in_epoch, is_passed, index = attached.place["loop"]
        epoch = attached.stored_epoch
        return (epoch, index * self._accumulate) if in_epoch and not is_passed else (epoch + in_epoch, 0)

    @property
    def accumulation(self) -> int:
        """The number of micro-batches per step, which an Accelerator may change during the training."""
        return self._accumulate if self._accelerator is None else self._accelerator.gradient_accumulation_steps

    @property
    def _batch(self) -> Batch:
        return self._parts if self._accumulate > 1 else self._parts[0]

    @uncompiled
    def backward(self, loss: Any, options: dict[str, Any], *, last: bool) -> None:
        """Run backward with the ``options`` of torch; after a step's last micro-batch its gradients are complete.

        Raises:
            UsageError: for an invalid loss, or a call without a batch or before the previous optimizer.step().
        """
        if not (isinstance(loss, Tensor) and loss.requires_grad and not loss.ndim):
            _check_loss(loss)
        if self._evaluations:  # within a closure, whose first evaluation is recorded when it returns
            if self._evaluations == 1:
                self._before_backward(loss)
            self._run_backward(loss, options)
            return
        if self._is_complete or not self._parts:
            self._require_open_step("scope.backward(loss)")
        self._before_backward(loss)
        self._run_backward(loss, options)
        if self._accelerator is None:
            self.record_loss(loss.detach(), complete=last or len(self._losses) + 1 >= self._accumulate)
        else:
            count = self._accelerator.gradient_accumulation_steps
            # accelerator.backward divides a copy of the loss by the count, so the recorded loss is divided here.
            mean_share = loss.detach() / count if count > 1 else loss.detach()
            self.record_loss(mean_share, complete=last or self._accelerator.sync_gradients)
        if self._stepped_in_backward and self._is_complete:
            self._end_step(skipped=False)

    def _require_open_step(self, call: str) -> None:
        """Start a step in a loop without ``scope.batches``; refuse other calls without a batch, or when it is over.

        Raises:
            UsageError: if no batch is open, or its gradients are complete.
        """
        if not self._parts and self.arguments is not None and not self._has_batches:
            self._opens_at_passes = True
            self._open_step()
        if not self._parts:
            raise UsageError(
                f"{call} was called without a batch: {ADVICE}. Take the next batch after the backward pass of this "
                "one, since the end of the data ends the epoch."
            )
        if self._is_complete:
            raise UsageError(
                f"{call} was called after the gradients of a step were complete and before its optimizer.step(). Give "
                "the number of micro-batches of a step to attach(..., accumulate=N); for several backward passes on "
                "one batch, call loss.backward() for each and scope.gradients_ready(loss) after the last."
            )

    @uncompiled
    def gradients_ready(self, loss: Any) -> None:
        """Note that the loop has computed all gradients of the step itself; ``loss`` is recorded, if given.

        Raises:
            UsageError: for an invalid loss, a call without a batch or twice in a step, and for named hooks with taps.
        """
        self._require_open_step("scope.gradients_ready()")
        if loss is not None:
            _check_number(loss)
            self._losses = [torch.as_tensor(loss).detach()]
        if not self._has_ready_gradients:
            self._has_ready_gradients = True
            self._attached.manager.hooks.leave_out_tapping(
                "This loop computes gradients itself and reports them by scope.gradients_ready(), where taps receive "
                "none; leave the hook out, or call scope.backward(loss)."
            )
        self._gradients_complete()

    def closure(self, function: Callable[[], Any]) -> "Closure":
        """Return a closure for optimizer.step, of which hooks see the first evaluation.

        Raises:
            UsageError: if ``function`` is not callable.
        """
        if not callable(function):
            kind = type(function).__name__
            raise UsageError(f"scope.closure was given a {kind}; give the closure, optimizer.step(scope.closure(fn)).")
        return Closure(self, function)

    def evaluate_closure(self, function: Callable[[], Any]) -> Any:
        """Evaluate the closure of the step in progress; after the first evaluation its gradients are complete."""
        if self._hook_calls.is_on or not self._is_in_closure_step:  # a hook's step, or a call outside of any step
            return function()
        self._evaluations += 1
        if self._evaluations > 1:
            with self._attached.manager.untapped_pass():
                return function()
        loss = function()
        self._losses = [] if loss is None else [torch.as_tensor(loss).detach()]
        self._gradients_complete()
        return loss

    def _begin_closure_step(self, optimizer: Optimizer, given: list[Any]) -> None:
        """Start the update of an optimizer that evaluates the closure of :meth:`closure`, one of its arguments."""
        is_known = any(isinstance(item, Closure) for item in given)
        if not (is_known or self._parts):
            self._begin_bare_step(computes_gradients=True)
            self._is_updating = self._is_bare and HookPoint.PRE_UPDATE not in self._bare_points
            return
        if not is_known:
            raise UsageError(
                f"{type(optimizer).__name__}.step was given a closure, which evaluates the loss within the step, where "
                "hooks cannot follow: give it as optimizer.step(scope.closure(closure))."
            )
        self._require_open_step("optimizer.step(scope.closure(fn))")
        if not self._has_closures:
            self._has_closures = True
            name = type(optimizer).__name__
            self._attached.manager.hooks.leave_out_for_closures(name)
        self._is_in_closure_step = self._is_updating = True

    def _before_backward(self, loss: Tensor) -> None:
        """Call hooks before the next pass; an Accelerator divides the loss by the number of micro-batches itself."""
        if self._driver.backward_callback is None:
            return
        count = 1 if self._accelerator is None else self._accelerator.gradient_accumulation_steps
        with self._hook_calls:
            self._driver.before_backward(loss, divisor=count)

    def _run_backward(self, loss: Tensor, options: dict[str, Any]) -> None:
        self._is_in_backward = True
        try:
            owner = self._driver.task if self._accelerator is None else self._accelerator
            owner.backward(loss, **options)
        finally:
            self._is_in_backward = False

    def record_loss(self, loss: Tensor, *, complete: bool) -> None:
        """Record the detached loss of a micro-batch after its backward pass; ``complete`` if it is the step's last."""
        self._losses.append(loss)
        if self.arguments is not None:
            self.arguments.after_backward()
        if complete:
            self._gradients_complete()

    def run_deferred_work(self) -> None:
        """Run the work after a step, which waits until the loop has stepped its schedulers."""
        if self._has_deferred_work:
            self._has_deferred_work = False
            with self._hook_calls:
                self._attached.after_step()

    @property
    def is_in_hook(self) -> bool:
        """Whether a hook or a sink of this scope is being called."""
        return self._hook_calls.is_on

    def is_in_step(self) -> bool:
        """Return whether a batch of the current step has been read, and its update has not been made."""
        return bool(self._parts)

    def _finish_step(self) -> None:
        """End a step that is still open, without an update."""
        self._end_partial_step()
        if self._is_complete:
            self._end_step(skipped=True)
        if self._losses:
            self._warn_once(
                "left over",
                f"{len(self._losses)} of {self._accumulate} micro-batches were left over at the end of an epoch, so "
                "their step is not recorded; call scope.backward(loss, last=True) for the last micro-batch of a "
                "shorter step.",
            )
        if self._parts:  # a step without a backward pass, or without its last one, does not count
            self._cancel_step()
        self.run_deferred_work()

    def evaluate(self, function: Callable[[], Result]) -> Result:
        """Return the result of an evaluation, isolated from the training unless the options say otherwise."""
        self._modes.begin_evaluation(is_isolated=self._attached.options.isolate_evaluation)

        def watched() -> Result:
            with self._modes.watched():
                return function()

        return self._attached.evaluate(watched)

    def end_epoch(self, numbers: Mapping[str, float]) -> None:
        """End the epoch in progress, if any."""
        self._modes.end_epoch(has_numbers=bool(numbers))
        self._finish_step()
        if self._is_in_epoch:
            self._is_in_epoch = self._is_data_exhausted = False
            with self._hook_calls:
                self._attached.after_epoch(numbers)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the run, between two steps."""
        self._end_partial_step()
        require(not self._parts, "scope.state_dict() was called within a step; call it after optimizer.step().")
        require(self._attached.is_started, "scope.state_dict() was called before the first step; call it after one.")
        self.run_deferred_work()
        self._attached.place = {"loop": (self._is_in_epoch, self._is_data_exhausted, self._index)}
        return self._attached.state_dict()

    def close(self, status: str, error: BaseException | None = None) -> None:
        """End the current epoch, unless the loop has failed, then the run."""
        for handle in self._handles:
            handle.remove()
        if self.arguments is not None:
            self.arguments.disarm()
        self._others.stop()
        self._modes.stop()
        try:
            if status == "completed" and self._has_no_step_left:
                self.start_without_steps()
            if status == "completed" and not self._attached.is_started:
                notice(
                    "The scope ends without a step, so nothing is recorded: iterate over scope.batches(loader), and "
                    "call scope.backward(loss) and optimizer.step() for every batch."
                )
            if status == "completed" and self._attached.is_started:
                self._finish_step()
                if self._attached.manager.counts_epochs:  # the step loop does not count an incomplete pass
                    self.end_epoch({})
        except BaseException as raised:
            status, error = "failed", raised
            raise
        finally:
            self._attached.end(status, error)

    def _gradients_complete(self) -> None:
        losses = self._losses
        # Without a loss the loop computes gradients itself, and has called gradients_ready() without one.
        loss = (losses[0] if len(losses) == 1 else torch.stack(losses).sum()) if losses else None
        self._is_complete = True
        if not self._has_checked_step:
            self._has_checked_step = True
            self._check_first_gradients()
        if self._scaler is None:
            with self._hook_calls:
                self._driver.after_backward(loss)
            return
        unscaled = unscaled_gradients(self._driver.task, scales_back=self._attached.keeps_gradients)
        with self._hook_calls, unscaled as skipped:
            self._driver.after_backward(loss, skipped=skipped)
        if skipped:
            self._end_step(skipped=True)

    def _check_first_gradients(self) -> None:
        """Report a first step that does not train the attached model, or trains it in eval mode."""
        model = self._driver.task.model
        kind = type(model).__name__
        if not self._stepped_in_backward and all(parameter.grad is None for parameter in model.parameters()):
            self._warn_once(
                "no gradients",
                f"No parameter of the attached model ({kind}) has a gradient after the first backward pass: the loss "
                "does not depend on it; attach the model that this loop trains.",
            )
        if not model.training:
            self._warn_once(
                "eval mode",
                f"The model ({kind}) is in eval mode in a training step, so that dropout and batch normalisation act "
                "as in an evaluation; call model.train() before the training, and after each evaluation.",
            )

    def before_update(self, index: int, optimizer: Optimizer, inputs: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Note the start of an optimizer's step, and report that of an update, with unscaled gradients."""
        if self._attached.is_closed or (self._scaler is not None and _is_skipped(optimizer)):
            return
        if self._modes.left_mode.is_watching:
            self._modes.left_mode.at_update()
        if self._is_in_backward:
            self._stepped_in_backward = True
            self._warn_once(
                "backward",
                f"{type(optimizer).__name__} steps within the backward pass, so hooks find updated weights and no "
                "gradients after it: measurements of gradients are missing, and PRE_UPDATE does not fire.",
            )
            return
        has_arguments = len(inputs) > 1 or options
        if has_arguments and (given := [item for item in (*inputs[1:], *options.values()) if item is not None]):
            self._begin_closure_step(optimizer, given)
            return
        if self._losses and not self._is_complete:
            self._warn_once(
                "short",
                f"optimizer.step() was called after only {len(self._losses)} of {self._accumulate} micro-batches, so "
                "hooks at POST_BACKWARD saw the gradients accumulated until then; call "
                "scope.backward(loss, last=True) for the last micro-batch of a shorter step.",
            )
            self._gradients_complete()
        if index in self._stepped:  # this optimizer starts another step, in which the others did not take part
            self._end_step(skipped=False)
        if self._stepped:  # another optimizer of the same step has stepped, and hooks have seen the gradients
            return
        if not self._is_complete:
            self._begin_bare_step()
        self._is_updating = self._is_complete or self._is_bare
        if self._is_updating:
            scales = self._scaler is not None and vars(optimizer).get("grad_scale") is not None
            task, attached = self._driver.task, self._attached
            unscaled = unscaled_gradients(task, scales_back=attached.keeps_gradients) if scales else nullcontext()
            with self._hook_calls, unscaled:
                self._driver.before_update()

    def after_update(self, index: int) -> None:
        """Note the end of an optimizer's step, and end the step of the loop with that of its last optimizer."""
        if self._is_updating:
            if self._is_in_closure_step:
                self._driver.record_learning_rate()
            if len(self._optimizers) > 1:
                self._stepped.add(index)
                if len(self._stepped) < len(self._optimizers):
                    return
            self._end_step(skipped=False)

    def _end_partial_step(self) -> None:
        """End a step that only some of the optimizers have made, when the next step starts."""
        if self._stepped:
            self._end_step(skipped=False)

    def _end_step(self, *, skipped: bool) -> None:
        with self._hook_calls:
            self._driver.after_update(skipped=skipped)
        self._parts, self._losses = MicroBatches(), []
        self._is_open = self._is_complete = self._is_updating = False
        self._is_in_closure_step = self._stepped_in_backward = False
        self._evaluations = 0
        self._stepped.clear()
        if self.arguments is not None and (self._opens_at_passes or self._has_batches):
            self.arguments.arm()
        self._index += 1
        self._has_deferred_work = True

    def _begin_bare_step(self, *, computes_gradients: bool = False) -> None:
        """Start a step of a loop that called optimizer.step() without the calls of the scope.

        If the first step ``computes_gradients`` in a closure, no hook sees them before an update.
        """
        attached, self._passed = self._attached, NO_ROWS
        if self.arguments is not None:
            self.arguments.disarm()
        if not attached.is_started:
            hooks = attached.manager.hooks
            reason = "loop only calls optimizer.step()"
            if computes_gradients:
                self._bare_points = BARE_POINTS - {HookPoint.PRE_UPDATE}
            hooks.restrict_to(self._bare_points, f"this {reason}; {ADVICE}.")
            disabled = ", ".join(hooks.failures.left_out) or "none"
            with self._hook_calls:
                attached.start(None, None, self.close)
            self._is_bare = True
            message = (
                f"This {reason}, so hooks see only its updates; disabled hooks: {disabled}. To use them, {ADVICE}."
            )
            self._warn_once("bare", message)
            self._others.watch()
        if self._is_bare:
            self.run_deferred_work()
            self._driver.loop.step += 1
        else:
            missing = "scope.backward(loss)" if self._parts else "a batch"
            message = (
                f"optimizer.step() was called without {missing} before it, so hooks have not seen it: {ADVICE}, or "
                "scope.gradients_ready(loss) if the loop computes gradients itself."
            )
            self._warn_once("unseen", message)

    def _report_other_optimizer(self, optimizer: Optimizer) -> None:
        loop, manager = self._driver.loop, self._attached.manager
        own = type(self._optimizers[0]).__name__
        sentence = (
            f"Another optimizer ({type(optimizer).__name__}) steps the parameters of the model, and hooks see only "
            f"the steps of the attached one ({own}): close the scope and attach the new optimizer."
        )
        if manager.task.ranks.is_main:
            alert = Alert(sentence, metric="other_optimizer", step=loop.step, id="optimizer-replaced")
            manager.delivery.report(alert, "optimizers", loop.epoch)

    def _warn_once(self, kind: str, sentence: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            warn(sentence, RunNotice, stacklevel=4)


def _is_skipped(optimizer: Optimizer) -> bool:
    """Return whether a scaler has called an optimizer for a step that must be skipped.

    GradScaler sets ``grad_scale`` and ``found_inf`` on an optimizer that unscales by itself, such as a fused one, and
    calls it also for these steps.
    """
    found = vars(optimizer).get("found_inf")
    return found is not None and bool(found)


def _check_loss(loss: Any) -> None:
    kind = type(loss).__name__
    if isinstance(loss, (tuple, list)):
        raise UsageError(
            f"The loss is a {kind} of length {len(loss)}; pass only the loss tensor to scope.backward, perhaps "
            "its first item."
        )
    if not isinstance(loss, Tensor):
        raise UsageError(f"The loss is a {kind}, not a tensor; give scope.backward the tensor of loss.backward().")
    if loss.numel() != 1:
        raise UsageError(f"The loss has shape {tuple(loss.shape)}; give scope.backward a single number: loss.mean().")
    if not loss.requires_grad:
        raise UsageError("The loss has no graph to differentiate; compute it with gradients on, and do not detach it.")


def _check_number(loss: Any) -> None:
    """Raise :class:`UsageError` unless the loss for the record is a number."""
    is_number = isinstance(loss, (int, float)) or (isinstance(loss, Tensor) and loss.numel() == 1 and not loss.ndim)
    if not is_number:
        shape = f" of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else ""
        raise UsageError(
            f"scope.gradients_ready was given a {type(loss).__name__}{shape}; give the loss of the step as a number, "
            "such as losses.mean(), or no loss."
        )
