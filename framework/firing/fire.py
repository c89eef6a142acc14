"""One fire: the hooks that are due get one view of the moment, and what they return goes on its way to the sinks."""

import torch
from torch import Tensor

from ..hooks import STEP_POINTS, CommitRecord, HookPoint, InterventionHook, ModelDataContext, RunDataContext
from ..isolation import borrowed_buffers, borrowed_gradients, borrowed_modes
from ..state import TrainingState
from ..training import TrainingTask
from .dispatch import MetricDispatch
from .hook_set import HookSet, Listener
from .views import Views


class Firing:
    """Fires hook points of one run: observers first, then interventions, then committing hooks."""

    def __init__(
        self,
        hooks: HookSet,
        task: TrainingTask,
        state: TrainingState,
        dispatch: MetricDispatch,
        views: Views,
        guardian_device: torch.device | None,
    ) -> None:
        self._hooks = hooks
        self._task = task
        self._state = state
        self._isolation = hooks.isolation
        self._dispatch = dispatch
        self._views = views
        self._guardian_device = guardian_device
        self._needs_target = hooks.listeners.need("needs_target_grad")

    def call_due(self, point: HookPoint) -> None:
        """Call the hooks that are due at ``point``; where none is, nothing is entered and no view is made."""
        loop = self._state.loop
        due = [listener for listener in self._hooks.listeners.at[point] if listener.is_due(loop.epoch, loop.step)]
        if not due:
            return
        isolation = self._isolation
        try:
            isolation.begin()
            context = self._views.at(point, self._target_grad(point) if self._needs_target else None)
            for listener in due:
                if listener.intervention is None:
                    self._observe(listener, context)
                else:
                    self._intervene(listener, listener.intervention, context)
            isolation.settle()
            if point not in STEP_POINTS:
                self._dispatch.deliver(point, loop.epoch, loop.step)
                isolation.settle()
        finally:
            isolation.end()

    def _observe(self, listener: Listener, context: RunDataContext) -> None:
        hook, point, step = listener.hook, listener.point, self._state.loop.step
        add = self._dispatch.add
        self._hooks.call(hook, point.name, step, lambda: add(hook, point, step, hook.compute(context)))

    def _intervene(self, listener: Listener, hook: InterventionHook, context: RunDataContext) -> None:
        point, step = listener.point, self._state.loop.step
        record = CommitRecord(hook.name, frozenset(hook.commits))
        model_context = ModelDataContext(
            self._task,
            self._state,
            record,
            self._isolation.parameters,
            mutates=hook.mutates,
            device=self._guardian_device,
            stream=(hook.name, point.name, step),
            loop=self._hooks.loop,
            profiler=self._hooks.profiler,
        )

        def intervene() -> bool:
            # The metrics' tensors are copied here, before any rollback, which is what makes them last.
            self._dispatch.add(hook, point, step, hook.intervene(context, model_context))
            return True

        returned = self._hooks.call(hook, point.name, step, intervene, intervention=hook)
        if returned and record.changes:
            record.apply()
            self._isolation.committed()

    def _target_grad(self, point: HookPoint) -> dict[str, Tensor] | None:
        """Ask the experiment for its target gradient, if a hook wants it now; isolated, and leaving nothing behind."""
        loop, model = self._state.loop, self._task.model
        if not self._hooks.listeners.wants("needs_target_grad", [point], loop.epoch, loop.step):
            return None

        def compute() -> dict[str, Tensor] | None:
            modes = borrowed_modes(model, train=None)
            with borrowed_buffers(model), modes, borrowed_gradients(model), torch.enable_grad():
                return self._task.target_grad(model)

        return self._hooks.isolated("target_grad", point.name, compute)
