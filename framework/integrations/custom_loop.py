"""Translation of a custom loop into steps and epochs: what happens in it is observed, and its calls add to that.

A step begins at the first pass of the model with gradients, or at the batch that the loop reports. Its gradients are
complete when they are first used, or when the loop reports it; it ends after the optimizer's update.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import cached_property, partial, wraps
from itertools import zip_longest
from operator import attrgetter
from threading import get_ident
from types import FrameType, NoneType
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from ..combined_optimizers import separate_optimizers
from ..data import Batch, MicroBatches
from ..doctor.senses import EvaluationModes, last_divisor, reaches
from ..errors import LoopscopeError, RunNotice, UsageError, notice, require, warn, with_lines
from ..hooks import Alert, HookPoint
from ..observing import listen, stop_listening
from ..runs import attempt, status_of_script
from ..state import Transient, uncompiled, visited
from ..training import BACKWARD, BETWEEN, EVALUATION, FORWARD, OTHER
from .attached_loop import AttachedLoop, Result
from .forward_arguments import ForwardArguments
from .gradient_unscaling import unscaled_gradients
from .other_optimizers import OtherOptimizers

NO_ROWS: Batch = ()
"""The batch of a step whose forward pass was not seen."""
BARE_POINTS = frozenset({HookPoint.PRE_UPDATE, HookPoint.POST_STEP})
"""The hook points that work in a bare loop, of which only the calls of optimizer.step() are seen."""
EVENTS = (
    *("on_scale", "before_backward", "after_backward", "on_failed_backward", "on_gradients_returned"),
    *("on_gradients_used", "on_unscale", "before_update", "after_update"),
)
"""The methods that a training calls unknowingly, besides those with the arguments of passes."""
ENTRIES = ("micro_batch", "before_backward", "after_backward", "on_gradients_used", "before_update", "after_update")
"""The calls of a step, whose cost no schedule changes."""
CLEARED = 3
"""Steps with gradients that were cleared before the update, from which on they are reported."""
UNUSED = 64
"""Backward passes without any update, from which on they are reported while gradients are cleared; at the end three."""
GRADIENT = attrgetter("grad")
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

    @property
    def is_entered(self) -> Callable[[], bool]:
        """A function that returns whether a hook is being called."""
        return partial(getattr, self, "is_on")  # without a call of a Python function

    def __enter__(self) -> None:
        self.is_on = True

    def __exit__(self, *error: object) -> None:
        self.is_on = False


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
    def enter(self, optimizer: Optimizer, inputs: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Note the start of a call, and report it if it is the outermost; a hook before the step.

        Returns the arguments with which torch continues, or ``None`` for the given ones.
        """
        if self._hook_calls.is_on:
            return None
        frame = sys._getframe(1)  # that of torch's wrapper
        self._depth = self._depth + 1 if self._depth and self._is_running(frame) else 1  # an earlier one has raised
        if self._depth > 1:
            return None
        self._frame = frame
        return self._loop.before_update(self._index, optimizer, inputs, options)

    @uncompiled
    def leave(self, optimizer: Optimizer, inputs: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Note the end of a call, and report it if it is the outermost; a hook after the step."""
        if self._hook_calls.is_on:
            return
        self._depth = max(0, self._depth - 1)
        if not self._depth:
            self._frame = None
            self._loop.after_update(self._index)

    def runs_below(self, frame: FrameType | None) -> bool:
        """Return whether the outermost call is one of the functions that have called this one."""
        return self._depth > 0 and self._is_running(frame)

    def _is_running(self, frame: FrameType | None) -> bool:
        while frame is not None and frame is not self._frame:
            frame = frame.f_back
        return frame is not None


class Phase(Enum):
    """The states between which the events of a loop move."""

    BETWEEN_STEPS = auto()
    IN_STEP = auto()
    COMPLETE = auto()
    """The gradients are complete, and hooks have seen them."""
    UPDATING = auto()
    """An optimizer steps."""


# Module constants, since until Python 3.12 every access to a member of an enum runs a Python function.
BETWEEN_STEPS, IN_STEP, COMPLETE, UPDATING = Phase


@dataclass
class Step:
    """What is known of the step in progress; a new one between two steps."""

    phase: Phase = BETWEEN_STEPS
    batches: MicroBatches = field(default_factory=MicroBatches)
    has_new_batch: bool = False
    """Whether the newest batch has had no backward pass yet."""
    losses: list[Tensor] = field(default_factory=list)
    returned: list[Tensor] = field(default_factory=list)
    """The losses whose gradients ``torch.autograd.grad`` has returned; those of the step if it has no backward pass."""
    calls: int = 0
    """The calls of :meth:`CustomLoop.backward`."""
    is_counted: bool = False
    """Whether passes were observed, so that the first use of the gradients completes them."""
    stepped: set[int] = field(default_factory=set)
    """The positions of the optimizers that have made this step."""
    stepped_in_backward: bool = False
    has_closure: bool = False
    evaluations: int = 0
    """The evaluations of the closure so far."""


class CustomLoop(Transient):
    """Translates the events and calls of a loop into the transitions of a driver.

    ``accumulate`` is the number of :meth:`backward` calls per step; other backward passes are counted. In a loop of
    Accelerate, the ``accelerator`` runs backward and decides when a step is complete.
    """

    def __init__(
        self, attached: AttachedLoop, accumulate: int, accelerator: AcceleratorLike | None, called: nn.Module | None
    ) -> None:
        """Observe the optimizers; of a loop that calls ``called``, the model or its wrapper, observe all events."""
        self._attached, self._accumulate, self._accelerator = attached, accumulate, accelerator
        self._optimizers: list[Optimizer] = separate_optimizers(attached.driver.task.optimizer)
        self._step = Step()
        self._index = self._first_index = 0  # of the step in the epoch
        self._is_in_epoch = self._is_data_exhausted = False  # state of the epoch
        self._is_bare = self._has_deferred_work = False
        self.has_batches = False
        """Whether the loop reports its batches."""
        self._bare_points = BARE_POINTS
        self._used: set[str] = set()
        """The calls that the loop has used, and the sentences that were shown."""
        self._is_in_backward = self._is_given_up = False
        self._gradients: tuple[list[Any], list[Any], list[int]] | None = None
        """The parameters, and their gradients with the versions of these, before the backward pass in progress."""
        self._nested_passes = 0
        self._was_shown = False
        """Whether hooks have received the loss of the pass in progress."""
        self._probe: tuple[Any, Tensor, int] | None = None
        """A parameter that the newest observed pass has reached, its gradient, and the version of that."""
        self._cleared = 0  # steps whose gradients were cleared before their update
        self._lost = 0  # steps whose gradients were cleared between their micro-batches
        self._passes = 0
        """The passes since the last update that have reached the parameters."""
        self._divisor, self._divisors = 0.0, set[float]()
        """The number by which the loop has divided the loss of the newest pass, and those of these passes.

        They are read after the first pass that was forgotten, and are 0 before.
        """
        self._reads_divisors = False
        self._evaluates_in_train_mode = False  # the newest pass without gradients since the last step
        self._scaled: Tensor | None = None
        self._scale: Tensor | None = None
        """The newest scaled loss, and its scale."""
        self._hook_calls = attached.hook_calls = HookCallSwitch()
        model = attached.driver.task.model
        self.copied: list[nn.Parameter] = []
        """Parameters of which the optimizer trains copies, such as those in float32 of a model in bfloat16."""
        self.arguments: ForwardArguments | None = None
        """Finds the batches, until the loop reports batches of tensors."""
        self._passed: Batch = NO_ROWS  # the arguments of the newest pass
        self.thread: int | None = None
        is_in_hook = self._hook_calls.is_entered
        if called is not None:
            self.arguments = ForwardArguments((model, called), self._on_pass, is_in_hook, self._on_evaluation_pass)
            attached.on_evaluation_numbers = self._on_evaluation_numbers
            self.arguments.arm()
            listen(self)
        attached.is_in_step = self.is_in_step
        self._use_driver()
        self._running = [RunningStep(self, index, self._hook_calls) for index, _ in enumerate(self._optimizers)]
        self._others = OtherOptimizers(model, self._optimizers, is_in_hook, self._report_other_optimizer)
        self._handles = [
            handle
            for optimizer, step in zip(self._optimizers, self._running, strict=True)
            for handle in (optimizer.register_step_pre_hook(step.enter), optimizer.register_step_post_hook(step.leave))
        ]

    def _use_driver(self) -> None:
        attached, task = self._attached, self._attached.driver.task
        self._driver, self._scaler = attached.driver, task.scaler
        self._driver.can_cancel_steps = True
        self._clock = attached.clock
        self._mark, self._now = self._clock.mark, self._clock.now
        if attached.manager.budget is not None:
            attached.manager.budget.meter.observe(self, ENTRIES)
            if self.arguments is not None:
                attached.manager.budget.meter.observe(self.arguments, ("receive",))
        self._modes = EvaluationModes(
            task.model,
            self._driver.loop,
            facts=attached.start_facts,
            is_in_hook=self._hook_calls.is_entered,
            report=partial(attached.manager.report, source="evaluation"),
            compiled=task.compiled,
        )

    # Batches

    def micro_batch(self, batch: Batch, steps: int | None, *others: Batch) -> None:
        """Start a step with its first micro-batch, or continue it with the next one.

        ``steps`` is the number of steps per epoch; ``others`` are the step's remaining micro-batches, if available.
        """
        attached, step = self._attached, self._step
        self.thread = self.thread or get_ident()
        if not attached.is_started:
            self._start(batch, steps)
        if step.stepped:
            self._end_step(skipped=False)
        if step.phase is COMPLETE:
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
        step = self._step if self._step.phase is BETWEEN_STEPS else self._continued_step()
        step.batches += (batch, *others)
        step.has_new_batch = True
        if step.phase is not BETWEEN_STEPS:
            self._driver.loop.batch = self._batch
            self._mark((FORWARD, self._now()))
            return
        step.phase, hook_calls = IN_STEP, self._hook_calls
        hook_calls.is_on = True
        try:
            self._driver.begin_step(self._batch if others or self._accumulate > 1 else batch, self._index)
        finally:
            hook_calls.is_on = False

    def _continued_step(self) -> "Step":
        """Return the open step, for its next micro-batch, or a new one if the loop has dropped its batch."""
        step = self._step
        if len(step.returned) >= len(step.batches):
            step.has_new_batch = False
        if step.has_new_batch and step.losses:  # the loop has dropped a batch before its backward pass
            del step.batches[-1]
        elif step.has_new_batch:
            self._cancel_step()
        return self._step

    def note_batch(self, batch: Batch) -> None:
        """Note a batch of the loop; one without data, such as indices, is replaced by the arguments of the pass.

        Not if ``loss=`` was given, which gets the loop's batch.
        """
        arguments = self.arguments
        has_tensors = any(_holds_data(value) for _, value, _ in visited("", batch))
        if arguments is not None and (has_tensors or "needs_loss" not in self._attached.lacks):
            arguments.stop()
            self.arguments = None
        elif arguments is not None:
            arguments.arm()

    @property
    def _batch(self) -> Batch:
        batches = self._step.batches
        return batches if self._accumulate > 1 or len(batches) > 1 else batches[0]

    def _cancel_step(self) -> None:
        """Forget a step whose batch the loop has dropped before its backward pass, or whose gradients it has."""
        self._step = Step()
        with self._hook_calls:
            self._driver.cancel_step()

    def drop_step(self) -> None:
        """Forget the open step, if any."""
        if self._step.batches:
            self._cancel_step()

    # Events

    @property
    def _is_observable(self) -> bool:
        """Whether an event is one of the loop: not of a hook, an evaluation, or a later evaluation of a closure."""
        attached = self._attached
        is_ours = self._hook_calls.is_on or attached.is_closed or attached.is_evaluating or self._is_in_backward
        return not is_ours and self._step.evaluations <= 1

    def _on_pass(self, batch: Batch, *, train: bool) -> None:
        """Note the arguments of a pass with gradients as the batch of the step, which it opens in train mode."""
        if self._step.phase is UPDATING:
            self._end_failed_update()
        step = self._step
        if self.has_batches:
            if step.has_new_batch:
                step.batches[-1] = batch
                self._driver.loop.batch = self._batch
            return
        self._passed, self.thread = batch, get_ident()
        is_next = step.phase in (BETWEEN_STEPS, IN_STEP) or bool(step.stepped and not self._is_stepping())
        attached = self._attached
        is_ours = self._hook_calls.is_on or attached.is_closed or attached.is_evaluating or self._is_in_backward
        if train and is_next and not is_ours and step.evaluations <= 1:
            # A pass with other weights in the model's place, such as an inner step of ``functional_call``: hooks see
            # the model after it, since the step begins with the backward pass.
            weights, name = self._first_weight
            weight = weights.get(name)
            if weight is not None and not weight.is_leaf:
                return
            if step.is_counted:
                self._drop_cleared_passes()
            self._passed = NO_ROWS
            self.micro_batch(batch, None)

    @cached_property
    def _first_weight(self) -> tuple[Mapping[str, Any], str]:
        """The table of the first parameter, which ``functional_call`` writes to as well, and its name there."""
        tables = [module._parameters for module in self._driver.task.model.modules()]
        names = ((table, name) for table in tables for name, item in table.items() if item is not None)
        return next(names, ({}, ""))

    def _open_step(self) -> None:
        """Start a step, or its next micro-batch, on the arguments of the newest pass."""
        batch, self._passed = self._passed, NO_ROWS
        self.micro_batch(batch, None)

    def on_scale(self, scaler: GradScaler, scaled: Any) -> None:
        """Note a loss that a scaler has multiplied; its scale is read without waiting for the device."""
        if self._is_observable and isinstance(scaled, Tensor) and scaler.is_enabled():
            self._scaled, self._scale = scaled, scaler._scale

    def before_backward(self, roots: Sequence[Tensor]) -> None:
        """Call hooks before a pass of the step, and note the gradients before it."""
        if self._is_in_backward:  # that of a checkpointed part, within the pass of the loss
            self._nested_passes += 1
            return
        attached = self._attached
        is_ours = self._hook_calls.is_on or attached.is_closed or attached.is_evaluating
        if is_ours or self._step.evaluations > 1:
            return
        if self._step.phase is UPDATING:
            self._end_failed_update()
        if self._step.is_counted:
            self._drop_cleared_passes()
        is_loss = len(roots) == 1 and not roots[0].ndim
        if self._step.phase is BETWEEN_STEPS and (self._passed is not NO_ROWS or (is_loss and self._reaches(roots[0]))):
            self._open_step()
        if self._driver.backward_callback and is_loss and self._step.phase is IN_STEP and self._step.has_new_batch:
            self._was_shown = True
            with self._hook_calls:
                self._driver.before_backward(roots[0], is_scaled=roots[0] is self._scaled)
        self._is_in_backward, self._gradients = True, self._read_gradients()
        if self._reads_divisors:
            self._divisor = last_divisor(roots[0]) if is_loss else 1.0
        self._mark((BACKWARD, self._now()))

    def _reaches(self, loss: Tensor) -> bool:
        """Return whether a loss of which no pass was seen, such as one by another method than forward, is the step's.

        Without hooks before backward passes, the step begins after the pass.
        """
        is_open = self._step.has_closure or self.has_batches or self._driver.backward_callback is None
        return not is_open and reaches(loss, self._parameters)

    def on_failed_backward(self) -> None:
        """Forget a pass that has raised an error."""
        if self._nested_passes:
            self._nested_passes -= 1
        elif self._gradients is not None:
            self._is_in_backward, self._gradients, self._scaled = False, None, None
            self._drop_shown_pass()

    def after_backward(self, roots: Sequence[Tensor]) -> None:
        """Count a pass that has reached the parameters."""
        if self._nested_passes:
            self._nested_passes -= 1
            return
        gradients, self._gradients = self._gradients, None
        if gradients is None:
            return
        self._mark((OTHER, self._now()))
        self._is_in_backward = False
        scaled, self._scaled = self._scaled, None
        step = self._step
        is_sharded = step.has_new_batch and self._driver.task.ranks.shards  # gradients may not be at the parameters
        if not (self._note_reached(*gradients) or step.stepped_in_backward or is_sharded):
            self._drop_shown_pass()
            return
        self._was_shown = False
        if step.phase is BETWEEN_STEPS and not (step.has_closure or self.has_batches):
            self._open_step()
            step = self._step
        if step.phase not in (IN_STEP, UPDATING) or (step.phase is UPDATING and not step.has_closure):
            return
        if step.returned:  # they are of a measurement, and so are the batches before the newest one
            step.returned = []
            del step.batches[:-1]
        step.is_counted = True
        self._passes += 1
        self._divisors.add(self._divisor)
        if len(roots) == 1 and roots[0].numel() == 1:
            loss = roots[0].detach()
            is_plain = not loss.ndim and scaled is None
            step.losses.append(loss if is_plain else _number(loss, self._scale if roots[0] is scaled else None))
        step.has_new_batch = False
        if self.arguments is not None:
            self.arguments.arm()
        if step.stepped_in_backward:
            self._gradients_complete()
            self._end_step(skipped=False)

    def _drop_shown_pass(self) -> None:
        """Let the next pass replace the one that hooks were shown, which has failed or was of another model."""
        if self._was_shown:
            self._was_shown = False
            self._driver.drop_backward()

    def on_gradients_returned(self, roots: Sequence[Tensor], inputs: Sequence[Any]) -> None:
        """Note a loss whose gradients the loop has got from ``torch.autograd.grad``, which may be those of the step."""
        if self._step.is_counted or self._step.phase not in (BETWEEN_STEPS, IN_STEP) or not self._is_observable:
            return
        own = set(map(id, self._parameters))
        if own.isdisjoint(map(id, inputs)):
            return
        if self._step.phase is BETWEEN_STEPS and self._passed is not NO_ROWS:
            self._open_step()
        if self._step.phase is IN_STEP and len(roots) == 1 and roots[0].numel() == 1:
            scaled, self._scaled = self._scaled, None
            self._step.returned.append(_number(roots[0], self._scale if roots[0] is scaled else None))
            if self.arguments is not None:
                self.arguments.arm()

    def on_gradients_used(self, gradients: Sequence[Tensor]) -> None:
        """Complete the step if gradients of its parameters are clipped, or their norm is computed."""
        if self._is_counting and self._is_observable:
            own = {id(parameter.grad) for parameter in self._parameters}
            if any(id(gradient) in own for gradient in gradients):
                self._gradients_complete()

    def on_unscale(self, optimizer: Optimizer) -> None:
        """Complete the step if a scaler unscales its gradients, or lets its optimizer step."""
        if self._is_counting and self._is_observable and any(item is optimizer for item in self._optimizers):
            self._gradients_complete()

    @property
    def _is_counting(self) -> bool:
        return self._step.phase is IN_STEP and (self._step.is_counted or bool(self._step.returned))

    @property
    def _parameters(self) -> list[Any]:
        return [item for optimizer in self._optimizers for group in optimizer.param_groups for item in group["params"]]

    def _read_gradients(self) -> tuple[list[Any], list[Any], list[int]]:
        """Return the parameters, and their gradients with the versions of these; no versions if there are none."""
        groups = self._optimizers[0].param_groups
        is_one_list = len(groups) == 1 and len(self._optimizers) == 1 and not self.copied
        parameters = groups[0]["params"] if is_one_list else [*self._parameters, *self.copied]
        gradients = [*map(GRADIENT, parameters)]
        if {*map(type, gradients)} == {NoneType}:  # nearly always, since zero_grad() removes them
            return parameters, gradients, []
        return parameters, gradients, [0 if gradient is None else gradient._version for gradient in gradients]

    def _note_reached(self, parameters: list[Any], gradients: list[Any], versions: list[int]) -> bool:
        """Return whether a pass has changed the gradient of a parameter, which is noted."""
        for parameter, gradient, version in zip_longest(parameters, gradients, versions):
            now = parameter.grad
            if now is not None and (now is not gradient or now._version != version):
                self._probe = parameter, now, now._version
                return True
        return False

    def _end_failed_update(self) -> None:
        """Count a step as skipped whose optimizer has raised an error, which the loop has caught."""
        if self._step.phase is UPDATING and not self._step.stepped and not self._is_stepping():
            self._end_step(skipped=True)

    def _is_stepping(self) -> bool:
        frame = sys._getframe(1)
        return any(item.runs_below(frame) for item in self._running)

    def _drop_cleared_passes(self) -> None:
        """Forget observed passes whose gradients the loop has cleared since, such as those of another model's loss."""
        step = self._step
        if step.phase is IN_STEP and step.is_counted and step.losses and self._is_cleared:
            newest = step.batches[-1] if step.has_new_batch or self.has_batches else NO_ROWS
            self._reads_divisors = True
            self._cancel_step()
            self._others.watch()
            self._report_missing_update(UNUSED)
            if newest is not NO_ROWS:
                self.micro_batch(newest, None)

    @property
    def _is_cleared(self) -> bool:
        """Whether a gradient that the newest observed pass has computed is gone, or was set to zero."""
        if self._probe is None:
            return False
        parameter, gradient, version = self._probe
        if parameter.grad is gradient and gradient._version != version:
            return not bool(torch.count_nonzero(gradient.detach()))
        return parameter.grad is None

    def _note_cleared(self) -> None:
        """Report gradients that the loop has cleared before the update in several steps."""
        self._cleared += 1
        if self._cleared == CLEARED:
            sentence = "The gradients are set to zero between the backward pass and the update."
            self._report(sentence, "cleared_gradients", "gradients-zeroed-too-early")

    def _note_lost_passes(self) -> None:
        """Report gradients that the loop has cleared between the micro-batches of several steps.

        Passes with cleared gradients may also be those of an attack or of another loss. They are micro-batches if the
        loop divides the loss of each by their number.
        """
        if self._divisors - {0.0} == {self._passes}:
            self._lost += 1
            if self._lost == CLEARED:
                count = self._passes
                sentence = (
                    f"The gradients are set to zero between {count} micro-batches, of which only the last counts."
                )
                self._report(sentence, "cleared_micro_batches", "gradients-zeroed-too-early")

    def _report_missing_update(self, passes: int) -> None:
        """Report that no update has followed at least so many passes, unless another optimizer makes the updates."""
        loop = self._driver.loop
        is_first = not loop.step or (loop.step == 1 and self._step.phase is IN_STEP)
        if is_first and self._passes >= passes and not self._others.have_stepped and self._is_new("no update"):
            sentence = f"optimizer.step() was not called after any of {self._passes} backward passes."
            self._report(sentence, "passes_without_update", "optimizer-not-stepped")

    def _report(self, sentence: str, metric: str, id: str) -> None:
        """Report a fault of the loop as an alert that belongs to a finding of the doctor."""
        alert = Alert(sentence, metric=metric, step=max(self._driver.loop.step, 1), value=self._passes, id=id)
        self._attached.manager.report(alert, "loop")

    def _on_evaluation_pass(self, train: bool) -> None:
        self._evaluates_in_train_mode = train and self._modes.have_effect()
        if self._clock.phase == BETWEEN:
            self._clock.enter(EVALUATION)

    def _on_evaluation_numbers(self) -> None:
        """Report an evaluation whose newest pass, before its numbers were logged, ran in train mode."""
        if self._evaluates_in_train_mode:
            self._modes.note_train_mode()

    # Epochs

    def begin_at(self, epoch: int, step: int, index: int) -> None:
        """Continue the numbers of a training without hooks, whose next step is the ``index``-th of its epoch."""
        self._attached.begin_at(epoch, step)
        if not self._attached.place:  # a loaded state has the position
            self._first_index = index

    def _start(self, batch: Batch | None, steps: int | None) -> None:
        if self.arguments is not None and not self.has_batches:
            self._attached.use_found_parts()
            self._use_driver()
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

    @uncompiled
    def backward(self, loss: Any, options: dict[str, Any], *, last: bool) -> None:
        """Run backward with the ``options`` of torch; after a step's last micro-batch its gradients are complete.

        Raises:
            UsageError: for an invalid loss, or a call without a batch or before the previous optimizer.step().
        """
        if not (isinstance(loss, Tensor) and loss.requires_grad and not loss.ndim):
            _check_loss(loss)
        is_recorded = not self._step.evaluations  # within a closure, its first evaluation is recorded when it returns
        if is_recorded and self._step.is_counted:
            self._drop_cleared_passes()
        if is_recorded and self._step.phase is not IN_STEP:
            self._require_open_step("scope.backward(loss)")
        if self._step.evaluations <= 1 and self._driver.backward_callback is not None:
            # An Accelerator divides the loss by the number of micro-batches itself.
            divisor = 1 if self._accelerator is None else self._accelerator.gradient_accumulation_steps
            with self._hook_calls:
                self._driver.before_backward(loss, divisor=divisor)
        self._is_in_backward = True
        self._mark((BACKWARD, self._now()))
        try:
            owner = self._driver.task if self._accelerator is None else self._accelerator
            owner.backward(loss, **options)
        finally:
            self._mark((OTHER, self._now()))
            self._is_in_backward = False
        if not is_recorded:
            return
        step = self._step
        step.calls += 1
        if self._accelerator is None:
            self.record_loss(loss.detach(), complete=last or step.calls >= self._accumulate)
        else:
            count = self._accelerator.gradient_accumulation_steps
            # accelerator.backward divides a copy of the loss by the count, so the recorded loss is divided here.
            mean_share = loss.detach() / count if count > 1 else loss.detach()
            self.record_loss(mean_share, complete=last or self._accelerator.sync_gradients)
        if step.stepped_in_backward and self._step.phase is COMPLETE:
            self._end_step(skipped=False)

    def _require_open_step(self, call: str) -> None:
        """Start a step in a loop without ``scope.batches``; refuse other calls without a batch, or when it is over.

        Raises:
            UsageError: if no batch is open, or its gradients are complete.
        """
        if self._step.phase is BETWEEN_STEPS and self.arguments is not None and not self.has_batches:
            self._open_step()
        if self._step.phase is BETWEEN_STEPS:
            raise UsageError(
                f"{call} was called without a batch: {ADVICE}. Take the next batch after the backward pass of this "
                "one, since the end of the data ends the epoch."
            )
        if self._step.phase is not IN_STEP:
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
            self._step.losses = [torch.as_tensor(loss).detach()]
        self._leave_out_tapping()
        self._gradients_complete()

    def _leave_out_tapping(self) -> None:
        if self._is_new("own gradients"):
            self._attached.manager.hooks.leave_out_tapping(
                "This loop computes gradients itself, as if it called scope.gradients_ready(), where taps receive "
                "none; leave the hook out, or call scope.backward(loss)."
            )

    def _evaluate_closure(self, function: Callable[[], Any]) -> Any:
        """Evaluate the closure of the step in progress; after the first evaluation its gradients are complete."""
        if self._hook_calls.is_on or not self._step.has_closure:  # a hook's call, or one outside of any step
            return function()
        self._step.evaluations += 1
        if self._step.evaluations > 1:
            with self._attached.manager.untapped_pass():
                return function()
        loss = function()
        if self._step.phase is not BETWEEN_STEPS:
            self._step.losses = [] if loss is None else [torch.as_tensor(loss).detach()]
            self._leave_out_for_closures()
            self._gradients_complete()
        return loss

    def _leave_out_for_closures(self) -> None:
        if self._is_new("closure"):
            self._attached.manager.hooks.leave_out_for_closures(type(self._optimizers[0]).__name__)

    def _begin_closure_step(self, inputs: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Start the update of an optimizer that evaluates a closure; return the arguments of its step to use."""
        step = self._step
        step.has_closure = True
        if step.phase is IN_STEP:
            self._leave_out_for_closures()
            step.phase = UPDATING
        optimizer, *rest = inputs
        given = [self._as_closure(item) for item in rest]
        return (optimizer, *given), {name: self._as_closure(item) for name, item in options.items()}

    def _as_closure(self, item: Any) -> Any:
        """Return a function among the arguments of ``optimizer.step`` as a closure that is observed."""
        return partial(self._evaluate_closure, item) if callable(item) and not isinstance(item, Tensor) else item

    def record_loss(self, loss: Tensor, *, complete: bool) -> None:
        """Record the detached loss of a micro-batch after its backward pass; ``complete`` if it is the step's last."""
        self._step.losses.append(loss)
        self._step.has_new_batch = False
        if self.arguments is not None:
            self.arguments.arm()
        if complete:
            self._gradients_complete()

    def run_deferred_work(self) -> None:
        """Run the work after a step, which waits until the loop has stepped its schedulers."""
        if self._has_deferred_work:
            self._has_deferred_work = False
            attached = self._attached
            is_quiet = self._driver.loop.step < attached.quiet_until
            if not is_quiet or attached.manager.hooks.failures.pending is not None:
                with self._hook_calls:
                    attached.after_step()

    @property
    def is_in_hook(self) -> bool:
        """Whether a hook or a sink of this scope is being called."""
        return self._hook_calls.is_on

    def is_in_step(self) -> bool:
        """Return whether a batch of the current step has been read, and its update has not been made."""
        return bool(self._step.batches)

    def _finish_step(self) -> None:
        """End a step that is still open, without an update."""
        if self._step.stepped:
            self._end_step(skipped=False)
        if self._step.phase is COMPLETE:
            self._end_step(skipped=True)
        if self._step.calls:
            self._warn_once(
                "left over",
                f"{self._step.calls} of {self._accumulate} micro-batches were left over at the end of an epoch, so "
                "their step is not recorded; call scope.backward(loss, last=True) for the last micro-batch of a "
                "shorter step.",
            )
        if self._step.batches:  # a step without a backward pass, or without its last one, does not count
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
        if self._step.stepped:
            self._end_step(skipped=False)
        require(not self._step.batches, "scope.state_dict() was called within a step; call it after optimizer.step().")
        require(self._attached.is_started, "scope.state_dict() was called before the first step; call it after one.")
        self.run_deferred_work()
        self._attached.place = {"loop": (self._is_in_epoch, self._is_data_exhausted, self._index)}
        return self._attached.state_dict()

    def isolate_failures(self) -> None:
        """Report an error of loopscope in one line, and let the training continue without it, which knows nothing."""
        for name in EVENTS:
            setattr(self, name, self._isolated(getattr(self, name)))
        if self.arguments is not None:
            self.arguments.receive_by(self._isolated(self._on_pass))

    def _isolated(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def event(*inputs: Any, **options: Any) -> Any:
            if self._is_given_up:
                return None
            try:
                return function(*inputs, **options)
            except Exception as error:
                self._is_given_up = True
                reason = str(error) if isinstance(error, LoopscopeError) else f"{with_lines(error)}."
                sys.stderr.write(f"loopscope watch: {reason} This training continues without loopscope.\n")
                self._handles = []  # not removed, since torch may iterate over them
                attempt(partial(self.close, "failed", error))
                return None

        return event

    def close(self, status: str, error: BaseException | None = None) -> None:
        """End the current epoch, unless the loop has failed, then the run."""
        for handle in self._handles:
            handle.remove()
        self._stop_observing()
        self._others.stop()
        self._modes.stop()
        try:
            if status == "completed" and self._has_no_step_left:
                self.start_without_steps()
            if status == "completed" and not self._attached.is_started:
                notice(
                    "The scope ends without a step, so nothing is recorded: attach to the model and the optimizer that "
                    "the loop trains, before it."
                )
            if status == "completed" and self._attached.is_started:
                self._report_missing_update(CLEARED)
                self._finish_step()
                if self._attached.manager.counts_epochs:  # the step loop does not count an incomplete pass
                    self.end_epoch({})
        except BaseException as raised:
            status, error = status_of_script(raised), raised
            raise
        finally:
            self._attached.end(status, None if status == "completed" else error)

    def _stop_observing(self) -> None:
        stop_listening(self)
        if self.arguments is not None:
            self.arguments.stop()

    def _gradients_complete(self) -> None:
        step = self._step
        if self.arguments is not None:
            self.arguments.disarm()  # until the next step, so that the tripwire finds equal settings in all of a step
        if step.returned:  # no backward pass was seen
            step.losses = step.losses or step.returned
            self._leave_out_tapping()
        losses = step.losses
        if self._passes > len(losses):
            self._note_lost_passes()
        # Without a loss the loop computes gradients itself, and has called gradients_ready() without one.
        loss = (losses[0] if len(losses) == 1 else torch.stack(losses).sum()) if losses else None
        if step.phase is IN_STEP:
            step.phase = COMPLETE
        if "first gradients" not in self._used:
            self._used.add("first gradients")
            self._check_first_gradients()
        if self._scaler is None:
            hook_calls = self._hook_calls
            hook_calls.is_on = True
            try:
                self._driver.after_backward(loss)
            finally:
                hook_calls.is_on = False
            return
        with self._hook_calls, unscaled_gradients(self._attached) as skipped:
            self._driver.after_backward(loss, skipped=skipped)
        if skipped:
            self._end_step(skipped=True)

    def _check_first_gradients(self) -> None:
        """Report a first step that does not train the attached model, or trains it in eval mode."""
        model = self._driver.task.model
        kind = type(model).__name__
        if not self._step.stepped_in_backward and all(parameter.grad is None for parameter in model.parameters()):
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

    def before_update(self, index: int, optimizer: Optimizer, inputs: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Note the start of an optimizer's step; for one with a closure, return the arguments to use."""
        if self._attached.is_closed or (self._scaler is not None and _is_skipped(optimizer)):
            return None
        self.thread = get_ident()
        if self._modes.left_mode.is_watching:
            self._modes.left_mode.at_update()
        if self._is_in_backward:
            self._step.stepped_in_backward = True
            self._warn_once(
                "backward",
                f"{type(optimizer).__name__} steps within the backward pass, so hooks find updated weights and no "
                "gradients after it: measurements of gradients are missing, and PRE_UPDATE does not fire.",
            )
            return None
        step = self._step
        if step.phase is IN_STEP and step.is_counted:
            if self._is_cleared:
                self._note_cleared()
            self._gradients_complete()
        elif step.phase is IN_STEP and step.losses:
            self._complete_short_step()
        # With gradients that were computed before, a closure such as ``lambda: loss`` only returns the loss.
        elif step.phase is not COMPLETE and not (step.is_counted or step.losses):
            if any(item is not None for item in (*inputs[1:], *options.values())):
                return self._begin_closure_step(inputs, options)
            self._complete_own_gradients()
        self._begin_update(index, optimizer)
        return None

    def _begin_update(self, index: int, optimizer: Optimizer) -> None:
        """Call hooks before the update of an optimizer whose gradients are complete."""
        if index in self._step.stepped:  # this optimizer starts another step, in which the others did not take part
            self._end_step(skipped=False)
        if self._step.stepped:  # another optimizer of the same step has stepped, and hooks have seen the gradients
            return
        if self._step.phase is not COMPLETE:
            self._begin_bare_step()
        if self._step.phase is COMPLETE or self._is_bare:
            self._step.phase = UPDATING
            if self._scaler is not None and vars(optimizer).get("grad_scale") is not None:
                with self._hook_calls, unscaled_gradients(self._attached):
                    self._driver.before_update()
                return
            hook_calls = self._hook_calls
            hook_calls.is_on = True
            try:
                self._driver.before_update()
            finally:
                hook_calls.is_on = False

    def _note_new_gradients(self) -> bool:
        """Return whether the loop has set gradients since the newest backward pass or update; note one of them."""
        if self._probe is not None:
            parameter, gradient, version = self._probe
            if parameter.grad is gradient and gradient._version == version:
                return False
        for parameter in self._parameters:
            if (gradient := parameter.grad) is not None:
                self._probe = parameter, gradient, gradient._version
                return True
        return False

    def _complete_own_gradients(self) -> None:
        """Complete a step at its update if the loop has set gradients without a backward pass."""
        is_between = self._step.phase is BETWEEN_STEPS
        can_open = is_between and self.arguments is not None and not (self.has_batches or self._is_bare)
        if not (can_open or self._step.phase is IN_STEP) or not self._note_new_gradients():
            return
        if is_between:
            self._open_step()
        if not self._step.returned:
            self._leave_out_tapping()
            self._warn_once(
                "no loss",
                "This loop sets gradients that come from no backward pass, so the record has no loss; call "
                "scope.gradients_ready(loss) before optimizer.step() to add it.",
            )
        self._gradients_complete()

    def _complete_short_step(self) -> None:
        """Complete the gradients of a step at its update, after fewer reported passes than announced."""
        self._warn_once(
            "short",
            f"optimizer.step() was called after only {self._step.calls} of {self._accumulate} micro-batches, so "
            "hooks at POST_BACKWARD saw the gradients accumulated until then; call "
            "scope.backward(loss, last=True) for the last micro-batch of a shorter step.",
        )
        self._gradients_complete()

    def after_update(self, index: int) -> None:
        """Note the end of an optimizer's step, and end the step of the loop with that of its last optimizer."""
        step = self._step
        if step.has_closure and step.phase is BETWEEN_STEPS:  # no pass of the closure was seen
            self._begin_bare_step(computes_gradients=True)
            step.phase = UPDATING if self._is_bare else BETWEEN_STEPS
        if step.phase is UPDATING or step.has_closure:
            if step.has_closure:
                self._driver.record_learning_rate()
            if len(self._optimizers) > 1:
                step.stepped.add(index)
                if len(step.stepped) < len(self._optimizers):
                    if self.arguments is not None and not self._is_bare:
                        self.arguments.arm()  # the others may not take part in this step
                    return
            self._end_step(skipped=False)

    def _end_step(self, *, skipped: bool) -> None:
        hook_calls = self._hook_calls
        hook_calls.is_on = True
        try:
            self._driver.after_update(skipped=skipped)
        finally:
            hook_calls.is_on = False
        self._step, self._evaluates_in_train_mode = Step(), False
        self._passes, self._divisors = 0, set()
        if self.arguments is not None and not self._is_bare:
            self.arguments.end_step()
        self._index += 1
        self._has_deferred_work = True

    def _begin_bare_step(self, *, computes_gradients: bool = False) -> None:
        """Start a step of a loop that called optimizer.step() without the calls of the scope.

        If the first step ``computes_gradients`` in a closure, no hook sees them before an update.
        """
        attached, self._passed = self._attached, NO_ROWS
        if not attached.is_started:
            self._stop_observing()
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
            missing = "a backward pass" if self._step.batches else "a pass of the model"
            message = (
                f"optimizer.step() was called without {missing} before it, so hooks have not seen it: {ADVICE}, or "
                "scope.gradients_ready(loss) if the loop computes gradients itself."
            )
            self._warn_once("unseen", message)

    def _report_other_optimizer(self, optimizer: Optimizer) -> None:
        own = type(self._optimizers[0]).__name__
        sentence = (
            f"Another optimizer ({type(optimizer).__name__}) steps the parameters of the model, and hooks see only "
            f"the steps of the attached one ({own}): close the scope and attach the new optimizer."
        )
        alert = Alert(sentence, metric="other_optimizer", step=self._driver.loop.step, id="optimizer-replaced")
        self._attached.manager.report(alert, "optimizers")

    def _warn_once(self, kind: str, sentence: str) -> None:
        if self._is_new(kind):
            warn(sentence, RunNotice, stacklevel=4)

    def _is_new(self, kind: str) -> bool:
        """Return whether this is the first use of a call, or the first time that a sentence is shown."""
        is_new = kind not in self._used
        self._used.add(kind)
        return is_new


def _holds_data(value: Any) -> bool:
    """Return whether a value is a tensor or an array of data, not one of indices: integers in one dimension."""
    if isinstance(value, Tensor):
        return value.ndim != 1 or value.is_floating_point() or value.is_complex()
    return isinstance(value, np.ndarray) and (value.ndim != 1 or value.dtype.kind not in "iu")


def _number(loss: Tensor, scale: Tensor | None) -> Tensor:
    """Return a loss of one element without its graph, its dimensions, and the scale of a scaler."""
    number = loss.detach()
    number = number.squeeze() if number.ndim else number
    return number if scale is None else number / scale.to(number.device)


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
