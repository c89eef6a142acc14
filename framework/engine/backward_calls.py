"""The calls of hooks before the backward passes of a step."""

import math
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from ..errors import StateMutationError
from ..hooks import BackwardContext, TrainingHook
from ..state import LoopState
from ..training import TrainingTask
from .hook_set import HookSet


class BackwardCalls:
    """Calls :meth:`.TrainingHook.before_backward` of the hooks that define it.

    The calls are made in the gate for calls during a pass, since a visit would take its baseline from parameters that
    FSDP2 has gathered for the pass.
    """

    def __init__(self, task: TrainingTask, hooks: HookSet) -> None:
        self._task, self._hooks = task, hooks
        self._due: list[TrainingHook] = []
        self._others: list[TrainingHook] = []
        """Hooks that are not due at this step, and have not received a loss that is not finite."""
        self._alarmed = set[str]()
        self.index = 0
        """The number of passes of the step."""
        self._parameters: dict[str, nn.Parameter] = {}
        self.are_needed = bool(hooks.listeners.of_backward_passes)
        """Whether any hook defines the method."""

    def begin_step(self, loop: LoopState) -> None:
        """Find the hooks that are due at the step."""
        listeners, self.index = self._hooks.listeners, 0
        self._due, self._others = [], []
        for hook in listeners.of_backward_passes:
            if listeners.is_scheduled(hook, loop.epoch, loop.step):
                self._due.append(hook)
            elif hook.name not in self._alarmed:
                self._others.append(hook)
        # Read now, since under FSDP2 the parameters are gathered copies without gradients before the backward pass.
        self._parameters = dict(self._task.model.named_parameters()) if self._due else {}

    def call(self, loop: LoopState, loss: Tensor, divisor: float, *, is_scaled: bool) -> None:
        """Call the due hooks, and for the first loss that is not finite the others."""
        alarmed = self._others if self._others and _is_known_nonfinite(loss) else []
        self.index += 1
        if not self._due and not alarmed:
            return
        context = BackwardContext(
            epoch=loop.epoch,
            step=loop.step,
            index=self.index - 1,
            loss=loss,
            divisor=divisor,
            is_scaled=is_scaled,
            parameters=self._parameters,
            ranks=self._task.ranks,
        )
        for hook in self._due:
            self._call_one(hook, loop, context)
        if self._due and self._task.ranks.shards:  # the hooks run collectives, in which all ranks must take part
            self._hooks.synchronise_failures()
        for hook in alarmed:
            self._alarmed.add(hook.name)
            self._call_one(hook, loop, replace(context, is_due=False))
        if alarmed:
            self._others = []

    def _call_one(self, hook: TrainingHook, loop: LoopState, context: BackwardContext) -> None:
        if hook in self._hooks.listeners.of_backward_passes:  # otherwise an earlier pass of the step has failed
            loop.loss = context.loss  # so that the checks of the gate include it
            try:
                self._hooks.call_before_backward(hook, partial(_read, hook, context))
            finally:
                loop.loss = None


def _read(hook: TrainingHook, context: BackwardContext) -> None:
    """Call the hook, and refuse a hook on the loss, which the checks of the training state do not find."""
    hooks = {*_hooks_of(context.loss)}
    try:
        hook.before_backward(context)
    finally:
        table = _hooks_of(context.loss)
        if added := table.keys() - hooks:
            for key in added:
                del table[key]
            raise StateMutationError(
                f"Hook {hook.name!r} at before_backward of step {context.step} may only read, but added a hook to the "
                "loss, which could change the gradients. The change was undone, and the run ends here."
            )


def _hooks_of(loss: Tensor) -> dict[int, Any]:
    return loss._backward_hooks or {}


def _is_known_nonfinite(loss: Tensor) -> bool:
    """Return whether a loss is NaN or infinite; reading an accelerator's would wait for it."""
    return type(loss) is Tensor and not loss.ndim and loss.is_cpu and not math.isfinite(loss.item())
