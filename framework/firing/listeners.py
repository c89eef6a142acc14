"""Who listens where: hooks by hook point, resolved once for one loop."""

from collections.abc import Iterable
from dataclasses import dataclass

from ..hooks import STEP_POINTS, EpochWindow, HookPoint, InterventionHook, StepSchedule, TrainingHook, windows_for


@dataclass(frozen=True)
class Listener:
    """A hook at one hook point of one loop type, everything resolved that can be before the run."""

    hook: TrainingHook
    point: HookPoint
    window: EpochWindow
    intervention: InterventionHook | None
    schedule: StepSchedule | None
    """``None``: every step, or a point between steps."""

    @classmethod
    def of(cls, hook: TrainingHook, point: HookPoint, window: EpochWindow) -> "Listener":
        """Resolve a hook at one of its points."""
        intervention = hook if isinstance(hook, InterventionHook) and hook.intervenes_at(point) else None
        schedule = hook.point_schedules.get(point, hook.step_schedule)
        thinned = (schedule.mode != "continual" or schedule.warmup > 0) and point in STEP_POINTS
        return cls(hook, point, window, intervention, schedule if thinned else None)

    def is_due(self, epoch: int, step: int) -> bool:
        """Tell whether the hook fires now."""
        return self.in_window(epoch) and (self.schedule is None or self.schedule.is_due(step))

    def in_window(self, epoch: int) -> bool:
        """Tell whether ``epoch`` lies within the hook's window at this point."""
        first, last = self.window
        return (first is None or epoch >= first) and (last is None or epoch <= last)

    @property
    def rank(self) -> int:
        """Order at one point: observers, interventions, committing interventions."""
        if self.intervention is None:
            return 0
        return 2 if self.intervention.commits else 1


class Listeners:
    """The listeners of a run, by hook point, in firing order."""

    def __init__(self, hooks: Iterable[TrainingHook], loop: str) -> None:
        by_point: list[list[Listener]] = [[] for _ in HookPoint]
        for hook in hooks:
            for point, window in windows_for(hook.hook_points, hook.loop_points, loop).items():
                by_point[point].append(Listener.of(hook, point, window))
        self.at = [sorted(listeners, key=lambda listener: listener.rank) for listeners in by_point]
        """Indexed by hook point: looking up a point without listeners is all that an empty fire costs."""

    def drop(self, hook: TrainingHook) -> None:
        """Let a hook fire no more."""
        self.at = [[listener for listener in listeners if listener.hook is not hook] for listeners in self.at]

    def of(self, hook: TrainingHook) -> list[Listener]:
        """Return where one hook listens."""
        return [listener for listeners in self.at for listener in listeners if listener.hook is hook]

    def wants(self, need: str, points: Iterable[HookPoint], epoch: int, step: int | None = None) -> bool:
        """Tell whether a hook with the flag ``need`` fires at one of ``points`` (and, if given, at ``step``)."""
        return any(
            getattr(listener.hook, need)
            and (listener.in_window(epoch) if step is None else listener.is_due(epoch, step))
            for point in points
            for listener in self.at[point]
        )

    def need(self, need: str) -> bool:
        """Tell whether any listening hook has the flag ``need``."""
        return any(getattr(listener.hook, need) for listeners in self.at for listener in listeners)
