"""The transitions of a training loop, one method each, which call the hooks at each hook point.

A step is :meth:`Driver.begin_step`, :meth:`Driver.before_backward` for each micro-batch, :meth:`Driver.after_backward`,
:meth:`Driver.before_update` and :meth:`Driver.after_update`. The loop decides what happens between these calls.
"""

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..data import Batch
from ..hooks import EPOCH_END, STEP_POINTS, HookPoint
from ..state import LoopState
from ..state.parameter_groups import learning_rate_of
from ..tensors import accumulate, is_readable, joint_norm, local_shards, unsharded
from ..training import BACKWARD, END, FORWARD, HOOKS, MANY_EVENTS, UPDATE, TrainingTask
from .backward_calls import BackwardCalls
from .budget import RECORDING
from .hook_set import HookSet
from .manager import HookManager
from .metric_delivery import QueueLength

# Module constants, since until Python 3.12 every access to a member of an enum runs a Python function.
PRE_EPOCH, PRE_STEP, POST_BACKWARD, PRE_UPDATE, POST_STEP, POST_EPOCH, SNAPSHOT = HookPoint
# The series doubles whenever it is full, so that each column is copied about once over a run.
INITIAL_COLUMNS = 128  # steps
ENTRIES = ("begin_step", "backward_callback", "after_backward", "before_update", "after_update")
"""The calls of a step, whose cost no schedule changes."""
SERIES = "needs_step_series"


class Driver:
    """Updates the loop's state and calls the hooks of its manager, at each transition of the loop."""

    def __init__(self, task: TrainingTask, manager: HookManager) -> None:
        self.task, self.manager, self.loop = task, manager, manager.state.loop
        self._hooks, self._taps, self.clock = manager.hooks, manager.taps, manager.profiler.clock
        self._mark, self._now = self.clock.mark, self.clock.now
        self._recorder = GradientRecorder(task, manager.hooks)
        self._backward_calls = BackwardCalls(task, manager.hooks)
        self.backward_callback = self.before_backward if self._backward_calls.are_needed else None
        """:meth:`before_backward`, or ``None`` if no hook is called before backward passes."""
        self._saves_streams = manager.hooks.listeners.any_has("needs_step_replay")
        self._checked_first_batch = False
        self.can_cancel_steps = False
        """Whether the loop may call :meth:`cancel_step`, for which hooks at PRE_STEP are remembered."""
        self._before_step: tuple[dict[str, Any], QueueLength] | None = None
        self._budget = manager.budget
        if self._budget is not None:
            self._budget.meter.observe(self, ENTRIES)
            self.flush_steps = self._budget.meter.of_delivery(self.flush_steps)  # type: ignore[method-assign]

    def begin_epoch(self, *, snapshot_follows: bool) -> None:
        """Clear the accumulators of the epoch and, if a hook needs it, copy the current state."""
        with self.clock.during(HOOKS):
            loop = self.loop
            loop.running_loss, loop.running_steps = None, 0
            loop.gradient_sum, loop.gradient_steps, loop.accumulated_grads = None, 0, None
            loop.series_steps = 0
            self._copy_state(EPOCH_END if snapshot_follows else EPOCH_END[:1])
            self._recorder.forget_parameters()
            self.manager.fire(PRE_EPOCH)

    def _copy_state(self, points: Sequence[HookPoint]) -> None:
        """Copy the state at the start of an epoch or interval, if a hook that is due at its end needs the copy."""
        loop, manager = self.loop, self.manager
        loop.pre_epoch = None
        if manager.hooks.listeners.any_due("needs_pre_epoch_state", points, loop.epoch):
            # Assigned before save(): the saved state then contains it, and a restore does not reset it to None.
            loop.pre_epoch = manager.pre_epoch_copy
            try:
                loop.pre_epoch.save(manager.state)
            except Exception as error:
                loop.pre_epoch = None
                manager.hooks.leave_out_needing("needs_pre_epoch_state", error)

    def begin_step(self, batch: Batch, index: int) -> None:
        """Start the step on the ``index``-th batch of the epoch, before zero_grad."""
        self._mark((HOOKS, self._now()))
        if len(self.clock.events) > MANY_EVENTS:
            self.clock.add_up()
        loop = self.loop
        if loop.has_unreported_evaluation:
            self.manager.report_evaluation()
        is_first = not self._checked_first_batch
        if is_first:
            self._checked_first_batch = True
            self.manager.hooks.check_first_batch(batch)
        loop.step += 1
        loop.batch, loop.batch_idx, loop.loss = batch, index, None
        loop.prev_step_grads, loop.current_grads = loop.current_grads, None
        if self._backward_calls.are_needed:
            self._backward_calls.begin_step(loop)
        due_hooks = self._hooks.due_at(PRE_STEP) if self._hooks.listeners.at[PRE_STEP] else []
        if due_hooks and self.can_cancel_steps:
            self._before_step = self._hooks.memory_of(due_hooks), self.manager.delivery.pending_steps.mark()
        if due_hooks or is_first:  # the first call also starts a manager that was not started
            self.manager.fire(PRE_STEP)
        if not self._taps.is_idle:
            self._taps.arrange()
        # Repeating the pass is for hooks after it: under a budget few steps have one.
        if self._saves_streams and (self._budget is None or self._is_any_due_after_backward()):
            self.manager.save_step_streams()
        scaler = self.task.scaler
        loop.loss_scale = None if scaler is None else scaler.get_scale()
        self._mark((FORWARD, self._now()))

    def cancel_step(self) -> None:
        """Undo :meth:`begin_step` for a batch that the loop has dropped: its PRE_STEP leaves no trace."""
        loop = self.loop
        loop.step -= 1
        loop.current_grads, loop.prev_step_grads = loop.prev_step_grads, None
        if self._before_step is not None:
            memory, mark = self._before_step
            self._before_step = None
            self._hooks.load_state_dict(memory)
            self.manager.delivery.pending_steps.truncate(mark)

    def before_backward(self, loss: Tensor, *, divisor: float = 1.0, is_scaled: bool = False) -> None:
        """Call the hooks that read the ``loss`` of a micro-batch, with its graph, before the backward pass.

        Args:
            loss: the tensor of which the gradients are computed next.
            divisor: a number by which the trainer still divides the loss.
            is_scaled: the loss scaler has already multiplied the loss.
        """
        if self._backward_calls.are_needed:
            self._mark((HOOKS, self._now()))
            self._backward_calls.call(self.loop, loss, divisor, is_scaled=is_scaled)
        self._mark((BACKWARD, self._now()))

    def drop_backward(self) -> None:
        """Undo :meth:`before_backward` for a pass that is not one of the step: the next one gets its index."""
        self._backward_calls.index -= 1

    def after_backward(self, loss: Tensor | None, *, skipped: bool = False) -> None:
        """Record the detached ``loss``, if known, and fire POST_BACKWARD; gradients are complete and unscaled."""
        self._mark((HOOKS, self._now()))
        loop = self.loop
        self._before_step = None
        if loss is not None:
            if self.task.ranks.data:
                loss = self.task.ranks.mean(loss)
            loop.running_loss = loss.clone() if loop.running_loss is None else loop.running_loss.add_(loss)
            loop.running_steps += 1
        loop.loss = loss
        if self._recorder.is_needed and self._budget is None:
            self._recorder.record(loop, skipped=skipped)
        elif self._recorder.is_needed and self._budget is not None:  # only if a hook is due that needs gradient data
            self._hooks.has_current_norm = self._recorder.needs_every_step or self._is_any_due_after_backward()
            if self._hooks.has_current_norm:
                self._budget.time_visit(RECORDING, partial(self._recorder.record, loop, skipped=skipped))
        if self._hooks.listeners.at[POST_BACKWARD] or not self._taps.is_idle:  # taps may have news
            self.manager.fire(POST_BACKWARD)
        self._mark((UPDATE, self._now()))

    def _is_any_due_after_backward(self) -> bool:
        first_due, step = self._hooks.listeners.first_due, self.loop.step
        return step >= min(first_due[POST_BACKWARD], first_due[PRE_UPDATE], first_due[POST_STEP])

    def before_update(self) -> None:
        """Fire PRE_UPDATE and record the learning rate of the step; not called for a skipped step."""
        if listeners := self._hooks.listeners.at[PRE_UPDATE]:
            self._mark((HOOKS, self._now()))
            self.manager.call_hooks(PRE_UPDATE, listeners)
        self._mark((UPDATE, self._now()))
        learning_rate = self.task.optimizer.param_groups[0].get("lr")
        if type(learning_rate) is float:
            self.loop.step_lr = learning_rate
        else:
            self.record_learning_rate()

    def record_learning_rate(self) -> None:
        """Record the learning rate of the step, which a scheduler may change afterwards."""
        learning_rate = learning_rate_of(self.task.optimizer.param_groups[0])
        # Cloned, since schedulers write to a tensor in place.
        self.loop.step_lr = learning_rate.clone() if isinstance(learning_rate, Tensor) else learning_rate

    def after_update(self, *, skipped: bool = False) -> None:
        """End a step; its update was ``skipped`` if its gradients overflowed in float16."""
        self._mark((HOOKS, self._now()))
        if skipped:
            self.loop.skipped_steps += 1
        elif listeners := self._hooks.listeners.at[POST_STEP]:
            self.manager.call_hooks(POST_STEP, listeners)
        if self._budget is not None:
            self._budget.end_step(self.loop.step)
        self._mark((END, self._now()))

    def end_batches(self) -> None:
        """Clear the current batch: the loop is between steps from now on."""
        self.loop.batch, self.loop.batch_idx, self.loop.loss = None, None, None

    def flush_steps(self) -> None:
        """Deliver step metrics, and compute the mean loss since the start of the interval, which displays show."""
        with self.clock.during(HOOKS):
            self.manager.delivery.flush_steps(self.loop.epoch)
        self.loop.update_mean_loss()

    def end_interval(self) -> None:
        """Deliver step metrics, and compute the mean loss and the mean gradient of the epoch or interval.

        An interval of the step loop contains the steps from one SNAPSHOT to the next.
        """
        loop = self.loop
        self.flush_steps()
        loop.running_loss, loop.running_steps = None, 0
        if loop.gradient_sum:
            with torch.no_grad():
                # Mean gradient = (Σ over the counted steps of g) / their number, in one call for all tensors.
                torch._foreach_div_(local_shards(loop.gradient_sum.values()), loop.gradient_steps)
            loop.accumulated_grads, loop.gradient_sum, loop.gradient_steps = loop.gradient_sum, None, 0
        self._recorder.forget_parameters()

    def evaluate(self) -> None:
        """Run the task's evaluation in eval mode, isolated from the run."""
        self.record_evaluation(self.manager.in_eval_mode("evaluation", self.task.evaluate))

    def record_evaluation(self, numbers: Mapping[str, float]) -> None:
        """Record the numbers of an evaluation, which hooks see until the next step.

        Unless a hook reports them at POST_EPOCH or SNAPSHOT, they are reported before the next step or evaluation.
        """
        loop = self.loop
        numbers = self.task.ranks.evaluation({_as_name(key): value for key, value in numbers.items()})
        is_repeated = loop.evaluated_at == loop.step and loop.evaluation.items() <= numbers.items()
        if loop.has_unreported_evaluation and not is_repeated:
            self.manager.report_evaluation()
        loop.evaluation, loop.evaluated_at, loop.has_unreported_evaluation = numbers, loop.step, True
        self.manager.log(logging.INFO, "Evaluation after step %d: %s", loop.step, numbers)

    def end_epoch(self) -> None:
        """Fire POST_EPOCH; the loop increments its epoch afterwards."""
        with self.clock.during(HOOKS):
            self.manager.fire(POST_EPOCH)

    def snapshot(self) -> None:
        """Fire SNAPSHOT, notify the sinks, and start a new series of steps."""
        with self.clock.during(HOOKS):
            self.manager.fire(SNAPSHOT)
            self.manager.delivery.snapshot(self.loop.epoch, self.loop.step)
        self.loop.series_steps = 0

    def begin_interval(self) -> None:
        """Start an interval of the step loop: clear its mean gradient and, if a hook needs it, copy the state."""
        self.loop.accumulated_grads = None
        with self.clock.during(HOOKS):
            self._copy_state((SNAPSHOT,))


def _as_name(key: Any) -> str:
    """Return the name of a number of an evaluation, whose key may be a class index or a tuple.

    >>> _as_name(3), _as_name(("val", "dog"))
    ('3', 'val/dog')
    """
    return "/".join(map(str, key)) if isinstance(key, tuple) else str(key)


class GradientRecorder:
    """Records in the loop state, after every backward pass, the gradient data that hooks need."""

    def __init__(self, task: TrainingTask, hooks: HookSet) -> None:
        self._task = task
        self._hooks = hooks
        recorders = {SERIES: _append_column, "needs_grads": self._add_up, "needs_prev_step_grads": self._copy}
        self._recorders = {need: record for need, record in recorders.items() if hooks.listeners.any_has(need)}
        """By the flag of the hooks that need them, the functions that record gradient data."""
        self.is_needed = bool(self._recorders)
        """Whether any hook needs gradient data."""
        within_steps = {item.hook for point in STEP_POINTS for item in hooks.listeners.at[point]}
        others = [item.hook for point in EPOCH_END for item in hooks.listeners.at[point]]
        has_others = not self._recorders.keys() <= {SERIES}
        self.needs_every_step = has_others or any(item.needs_step_series for item in others if item not in within_steps)
        """Whether a hook needs gradient data also of steps at which it is not due."""
        self._named: list[tuple[str, nn.Parameter]] = []

    def forget_parameters(self) -> None:
        """Clear the cached list of named parameters, which the next step rebuilds."""
        self._named = []

    def record(self, loop: LoopState, *, skipped: bool = False) -> None:
        """Record this step's gradient data for the hooks that need it; for a skipped step only loss and norm."""
        self._named = self._named or list(self._task.model.named_parameters())
        live = {name: parameter.grad for name, parameter in self._named if parameter.grad is not None}
        with torch.no_grad():
            for need in [*self._recorders] if not skipped else self._recorders.keys() & {SERIES}:
                try:
                    self._recorders[need](loop, live)
                except Exception as error:
                    self._hooks.leave_out_needing(need, error)
                    del self._recorders[need]

    def _add_up(self, loop: LoopState, live: dict[str, Tensor]) -> None:
        if self._hooks.listeners.any_due("needs_grads", EPOCH_END, loop.epoch):
            earlier, loop.gradient_sum = loop.gradient_sum, None  # also after an error
            loop.gradient_sum = accumulate(earlier, live)
            loop.gradient_steps += 1

    def _copy(self, loop: LoopState, live: dict[str, Tensor]) -> None:
        next_epoch = loop.epoch + (loop.batch_idx == len(self._task.loader) - 1)
        if self._hooks.listeners.any_due("needs_prev_step_grads", STEP_POINTS, next_epoch, loop.step + 1):
            loop.current_grads = {name: gradient.clone() for name, gradient in live.items()}


def _append_column(loop: LoopState, live: dict[str, Tensor]) -> None:
    """Append loss and gradient norm to the series, a tensor of shape (2, columns) that grows by doubling."""
    series, count = loop.step_series, loop.series_steps
    if loop.loss is None:
        return
    if series is None:
        # float64 represents losses and norms of all dtypes exactly.
        series = unsharded(loop.loss).new_zeros(2, INITIAL_COLUMNS, dtype=torch.float64)
    elif count == series.shape[1]:
        series = torch.cat([series, torch.zeros_like(series)], dim=1)
    loss, norm = unsharded(loop.loss), joint_norm(list(live.values()))
    # Column t holds the loss L_t and ‖g_t‖₂, the joint norm over all parameters.
    if is_readable(series) and is_readable(norm):
        series.numpy()[:, count] = loss.item(), norm.item()  # a fourth of the time of operations on tensors
    else:
        series[:, count] = torch.stack([loss.double(), norm.to(series)])
    loop.step_series, loop.series_steps = series, count + 1
