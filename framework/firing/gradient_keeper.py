"""What hooks ask to have kept of every step: its gradient, the mean of all gradients, its loss and gradient norm."""

import torch
from torch import Tensor, nn

from ..hooks import EPOCH_END, STEP_POINTS
from ..state import LoopState, accumulate, joint_norm, whole
from ..training import TrainingTask
from .hook_set import HookSet

ROOM = 128  # steps


class GradientKeeper:
    """Adds to the loop state, after every backward, what the hooks of the run will want to see of the gradients."""

    def __init__(self, task: TrainingTask, hooks: HookSet) -> None:
        self._task = task
        self._hooks = hooks
        self._sums = hooks.listeners.need("needs_grads")
        self._previous = hooks.listeners.need("needs_prev_step_grads")
        self._series = hooks.listeners.need("needs_step_series")
        self._named: list[tuple[str, nn.Parameter]] = []

    def renew(self) -> None:
        """Look the model's parameters up anew at the next step; until then they are taken to be the same objects."""
        self._named = []

    def gather(self, loop: LoopState, *, skipped: bool = False) -> None:
        """Keep this step's gradients as far as a hook asks for them; of a skipped step only loss and norm."""
        if not (self._sums or self._previous or self._series):
            return
        self._named = self._named or list(self._task.model.named_parameters())
        live = {name: parameter.grad for name, parameter in self._named if parameter.grad is not None}
        with torch.no_grad():
            if self._series:
                _append(loop, list(live.values()))
            if self._sums and not skipped and self._hooks.listeners.wants("needs_grads", EPOCH_END, loop.epoch):
                loop.gradient_sum = accumulate(loop.gradient_sum, live)
                loop.gradient_steps += 1
            if self._previous and not skipped:
                in_next_epoch = loop.batch_idx == len(self._task.loader) - 1
                next_epoch, next_step = loop.epoch + in_next_epoch, loop.step + 1
                if self._hooks.listeners.wants("needs_prev_step_grads", STEP_POINTS, next_epoch, next_step):
                    loop.current_grads = {name: gradient.clone() for name, gradient in live.items()}


def _append(loop: LoopState, gradients: list[Tensor]) -> None:
    """Add a column to the series of loss and gradient norm, which grows by doubling."""
    series, count = loop.step_series, loop.series_steps
    if loop.loss is None:
        return
    if series is None:
        series = whole(loop.loss).new_zeros(2, ROOM, dtype=torch.float64)
    elif count == series.shape[1]:
        series = torch.cat([series, torch.zeros_like(series)], dim=1)
    loss = whole(loop.loss).double()
    series[:, count] = torch.stack([loss, joint_norm(gradients).to(loss)])
    loop.step_series, loop.series_steps = series, count + 1
