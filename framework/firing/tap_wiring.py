"""The wiring of taps: between the hooks that declare them and the model in which they listen."""

from collections.abc import Sequence
from functools import partial

from ..hooks import InterventionHook, StatePart, Tap, TapOwner, TapSet, TrainingHook
from ..isolation import Call
from ..state import TrainingState
from ..training import LossProbe, TrainingTask
from .hook_set import HookSet


class TapWiring:
    """Connects the taps of hooks, so that each is called on the steps of its hook and in no other pass."""

    def __init__(self, hooks: HookSet, taps: TapSet, task: TrainingTask, state: TrainingState) -> None:
        self._hooks = hooks
        self._taps = taps
        self._task = task
        self._state = state

    def attach(self) -> None:
        """Ask every hook that has started for its taps, then attach those of the hooks that are still on."""
        hooks = self._hooks
        with hooks.isolation.visit():
            taps = {hook.name: hooks.call(hook, "taps", 0, partial(self._declared, hook)) for hook in list(hooks)}
        # Outside of the visit, which would take a hook on a module for a change of the training state.
        for hook in hooks:
            self._taps.attach(self._owner(hook), taps[hook.name] or ())

    def hear(self) -> None:
        """Run the step's batch once more, on streams of its own, for the taps that a compiled pass cannot serve."""
        probe = LossProbe(self._task, self._state, self._hooks.profiler)
        run_once = partial(probe.run_once, self._state.loop.batch)
        call = Call("taps", "POST_BACKWARD", self._state.loop.step, "The")
        with self._hooks.isolation.visit():
            self._hooks.isolation.observe(call, partial(self._taps.hear, run_once))

    def _declared(self, hook: TrainingHook) -> Sequence[Tap]:
        """Return the taps of a hook, none if it is left out of this loop."""
        return list(hook.taps(self._task.model)) if self._hooks.listeners.of(hook) else []

    def _owner(self, hook: TrainingHook) -> TapOwner:
        loop = self._state.loop

        def is_due() -> bool:
            listeners = self._hooks.listeners.of(hook)
            return hook.step_schedule.is_due(loop.step) and any(item.in_window(loop.epoch) for item in listeners)

        commits = hook.commits if isinstance(hook, InterventionHook) else ()
        call = partial(self._hooks.call_tap, hook)
        return TapOwner(hook.name, is_due, call, may_replace=StatePart.GRADIENTS in commits)
