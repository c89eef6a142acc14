"""Keeps the gradients of the steps for hooks that ask for their mean, or for those of the previous step."""

import torch
from torch import nn

from framework.hook_points import HookPoint
from framework.manager import HookManager
from framework.param_vectors import accumulate
from framework.train_step import TrainingTask
from framework.training_state import LoopState

EPOCH_END = (HookPoint.POST_EPOCH, HookPoint.SNAPSHOT)


class GradientKeeper:
    """Adds to the loop state, after every backward, what the hooks of the run will want to see of the gradients."""

    def __init__(self, task: TrainingTask, hooks: HookManager) -> None:
        self._task = task
        self._hooks = hooks
        self._sums = hooks.needs("needs_grads")
        self._previous = hooks.needs("needs_prev_step_grads")
        self._named: list[tuple[str, nn.Parameter]] = []

    def renew(self) -> None:
        """Look the model's parameters up again at the next step: they are otherwise taken for the same."""
        self._named = []

    def gather(self, loop: LoopState) -> None:
        """Keep this step's gradients, as far as a hook asks for them."""
        if not (self._sums or self._previous):
            return
        self._named = self._named or list(self._task.model.named_parameters())
        live = {name: parameter.grad for name, parameter in self._named if parameter.grad is not None}
        with torch.no_grad():
            if self._sums and self._hooks.wants("needs_grads", points=EPOCH_END):
                loop.gradient_sum = accumulate(loop.gradient_sum, live)
                loop.gradient_steps += 1
            if self._previous:
                in_next_epoch = loop.batch_idx == len(self._task.loader) - 1
                if self._hooks.wants_previous_gradients(loop.epoch + in_next_epoch, loop.step + 1):
                    loop.current_grads = {name: gradient.clone() for name, gradient in live.items()}
