"""The transitions of a training loop, one method each: the one place where hook points are fired.

A step is :meth:`Driver.begin_step`, :meth:`Driver.after_backward`, :meth:`Driver.before_update` and
:meth:`Driver.after_update`; what lies between them, and how often, is up to the loop that drives.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ..data import Batch
from ..hooks import EPOCH_END, STEP_POINTS, HookPoint
from ..state import LoopState, accumulate, joint_norm, local_shards, unsharded
from ..training import TrainingTask
from .hook_set import HookSet
from .manager import HookManager

# Named here, since until Python 3.12 a member is found by a function in Python each time.
PRE_EPOCH, PRE_STEP, POST_BACKWARD, PRE_UPDATE, POST_STEP, POST_EPOCH, SNAPSHOT = HookPoint
# Doubled whenever it is full, so that over a run each column is copied about once.
ROOM = 128  # steps


class Driver:
    """Keeps the state of a loop, and fires the hook points of its manager, at each of the loop's transitions."""

    def __init__(self, task: TrainingTask, manager: HookManager) -> None:
        self.task, self.manager, self.loop = task, manager, manager.state.loop
        self._hooks = manager.hooks
        self._keeper = GradientKeeper(task, manager.hooks)
        self._has_seen = False

    def begin_epoch(self, *, takes_snapshot: bool) -> None:
        """Clear the accumulators of the epoch and, if a hook will ask for it, copy the state it starts from."""
        loop, manager = self.loop, self.manager
        loop.running_loss, loop.running_steps = None, 0
        loop.gradient_sum, loop.gradient_steps, loop.accumulated_grads = None, 0, None
        loop.series_steps = 0
        points = EPOCH_END if takes_snapshot else EPOCH_END[:1]
        loop.pre_epoch = None
        if manager.hooks.listeners.wants("needs_pre_epoch_state", points, loop.epoch):
            loop.pre_epoch = manager.pre_epoch_snapshot  # before it is saved, or putting it back would take it away
            try:
                loop.pre_epoch.save(manager.state)
            except Exception as error:
                loop.pre_epoch = None
                manager.hooks.without_those_that_need("needs_pre_epoch_state", error)
        self._keeper.renew()
        manager.fire(PRE_EPOCH)

    def begin_step(self, batch: Batch, index: int) -> None:
        """Begin the step on a batch, the ``index``-th of the epoch, before its gradients are zeroed."""
        loop = self.loop
        if not self._has_seen:
            self._has_seen = True
            self.manager.hooks.see_first(batch)
        loop.step += 1
        loop.batch, loop.batch_idx, loop.loss = batch, index, None
        loop.prev_step_grads, loop.current_grads = loop.current_grads, None
        self.manager.fire(PRE_STEP)
        self.manager.arrange_taps()
        scaler = self.task.scaler
        loop.loss_scale = None if scaler is None else scaler.get_scale()

    def after_backward(self, loss: Tensor, *, skipped: bool = False) -> None:
        """Take the step's ``loss``, detached, and its gradients, complete and unscaled, on the parameters."""
        loop = self.loop
        if self.task.ranks.data:
            loss = self.task.ranks.mean(loss)
        loop.loss = loss
        loop.running_loss = loss.clone() if loop.running_loss is None else loop.running_loss.add_(loss)
        loop.running_steps += 1
        if self._keeper.is_asked:
            self._keeper.gather(loop, skipped=skipped)
        self.manager.fire(POST_BACKWARD)

    def before_update(self) -> None:
        """Look at the gradients as the optimizer is about to use them; left out where a step is skipped."""
        if self._hooks.listeners.at[PRE_UPDATE]:
            self.manager.fire(PRE_UPDATE)
        rate: float | Tensor = self.task.optimizer.param_groups[0]["lr"]  # a tensor is what schedulers write to
        self.loop.step_lr = rate.clone() if isinstance(rate, Tensor) else rate

    def after_update(self, *, skipped: bool = False) -> None:
        """End a step whose update was made or, its gradients having left float16, ``skipped``."""
        if skipped:
            self.loop.skipped_steps += 1
        elif self._hooks.listeners.at[POST_STEP]:
            self.manager.fire(POST_STEP)

    def end_batches(self) -> None:
        """Forget the batch in flight: what comes next is between steps."""
        self.loop.batch, self.loop.batch_idx, self.loop.loss = None, None, None

    def end_interval(self) -> None:
        """Deliver the metrics of steps, and turn running sums into means: the loss, the mean gradient."""
        loop = self.loop
        self.manager.dispatch.flush_steps(loop.epoch)
        if loop.running_loss is not None:
            loop.epoch_loss = float(loop.running_loss) / loop.running_steps
            loop.running_loss, loop.running_steps = None, 0
        if loop.gradient_sum is not None:
            with torch.no_grad():
                torch._foreach_div_(local_shards(loop.gradient_sum.values()), loop.gradient_steps)
            loop.accumulated_grads, loop.gradient_sum, loop.gradient_steps = loop.gradient_sum, None, 0
        self._keeper.renew()

    def evaluate(self) -> None:
        """Run the task's evaluation in eval mode, isolated from the run."""
        self.evaluated(self.manager.in_eval_mode("evaluation", self.task.evaluate))

    def evaluated(self, numbers: Mapping[str, float]) -> None:
        """Note the numbers of an evaluation, which hooks are shown until the next step."""
        self.loop.evaluation, self.loop.evaluated_at = self.task.ranks.evaluation(numbers), self.loop.step

    def end_epoch(self) -> None:
        """Look back on the epoch; the loop counts on by itself."""
        self.manager.fire(POST_EPOCH)

    def snapshot(self) -> None:
        """Take stock, of the epoch or of the steps since the last time."""
        self.manager.fire(SNAPSHOT)
        self.manager.dispatch.snapshot(self.loop.epoch, self.loop.step)
        self.loop.series_steps = 0


class GradientKeeper:
    """Adds to the loop state, after every backward, what the hooks of the run will want to see of the gradients."""

    def __init__(self, task: TrainingTask, hooks: HookSet) -> None:
        self._task = task
        self._hooks = hooks
        self._sums = hooks.listeners.need("needs_grads")
        self._previous = hooks.listeners.need("needs_prev_step_grads")
        self._series = hooks.listeners.need("needs_step_series")
        self.is_asked = self._sums or self._previous or self._series
        """Whether any hook wants anything kept."""
        self._named: list[tuple[str, nn.Parameter]] = []

    def renew(self) -> None:
        """Look the model's parameters up anew at the next step; until then they are taken to be the same objects."""
        self._named = []

    def gather(self, loop: LoopState, *, skipped: bool = False) -> None:
        """Keep this step's gradients as far as a hook asks for them; of a skipped step only loss and norm."""
        self._named = self._named or list(self._task.model.named_parameters())
        live = {name: parameter.grad for name, parameter in self._named if parameter.grad is not None}
        hooks = self._hooks
        with torch.no_grad():
            if self._series:
                try:
                    _append(loop, list(live.values()))
                except Exception as error:
                    hooks.without_those_that_need("needs_step_series", error)
                    self._series = False
            if self._sums and not skipped and hooks.listeners.wants("needs_grads", EPOCH_END, loop.epoch):
                try:
                    loop.gradient_sum = accumulate(loop.gradient_sum, live)
                    loop.gradient_steps += 1
                except Exception as error:
                    hooks.without_those_that_need("needs_grads", error)
                    loop.gradient_sum, loop.gradient_steps, self._sums = None, 0, False
            if self._previous and not skipped:
                in_next_epoch = loop.batch_idx == len(self._task.loader) - 1
                next_epoch, next_step = loop.epoch + in_next_epoch, loop.step + 1
                if hooks.listeners.wants("needs_prev_step_grads", STEP_POINTS, next_epoch, next_step):
                    try:
                        loop.current_grads = {name: gradient.clone() for name, gradient in live.items()}
                    except Exception as error:
                        hooks.without_those_that_need("needs_prev_step_grads", error)
                        self._previous = False


def _append(loop: LoopState, gradients: list[Tensor]) -> None:
    """Add a column to the series of loss and gradient norm, which grows by doubling."""
    series, count = loop.step_series, loop.series_steps
    if loop.loss is None:
        return
    if series is None:
        # float64 holds losses and norms of all dtypes exactly.
        series = unsharded(loop.loss).new_zeros(2, ROOM, dtype=torch.float64)
    elif count == series.shape[1]:
        series = torch.cat([series, torch.zeros_like(series)], dim=1)
    loss = unsharded(loop.loss).double()
    series[:, count] = torch.stack([loss, joint_norm(gradients).to(loss)])
    loop.step_series, loop.series_steps = series, count + 1
