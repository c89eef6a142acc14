"""Listeners: the hooks of each hook point in the order of their calls, with their schedules."""

import sys
from collections.abc import Iterable
from operator import attrgetter

from ..errors import RunNotice, UsageError, require, warn
from ..hooks import (
    ALWAYS,
    STEP_POINTS,
    EpochWindow,
    HookPoint,
    InterventionHook,
    StepSchedule,
    TrainingHook,
    windows_for,
)


class Listener:
    """A hook at one hook point of one loop type, with its window and schedule resolved."""

    def __init__(self, hook: TrainingHook, point: HookPoint, window: EpochWindow) -> None:
        self.hook, self.point, self._window = hook, point, window
        self.where = point.name  # cached, since enum members compute their name at every access
        # In the step loop, SNAPSHOT replaces the points outside of steps.
        points = hook.hook_points if hook.loop_points is None and point not in hook.hook_points else (point,)
        intervenes = isinstance(hook, InterventionHook) and any(map(hook.intervenes_at, points))
        self.intervention = hook if isinstance(hook, InterventionHook) and intervenes else None
        self.call_order = 0 if self.intervention is None else 1 + bool(self.intervention.commits)
        """Order at one point: observers, interventions, committing interventions."""
        self.has_urgent_metrics = point in STEP_POINTS and type(hook).is_urgent is not TrainingHook.is_urgent
        self.reschedule()

    def reschedule(self) -> None:
        """Use the schedule that the hook has now."""
        hook, point = self.hook, self.point
        self.schedule = schedule = hook.point_schedules.get(point, hook.step_schedule)
        advice = "it must be a StepSchedule, such as StepSchedule(mode='stride', every_n_steps=10)"
        is_valid = isinstance(schedule, StepSchedule)
        require(is_valid, f"Hook {hook.name!r} has step_schedule = {schedule!r}; {advice}.")
        skips_steps = (schedule.mode != "continual" or schedule.warmup > 0) and point in STEP_POINTS
        self._schedule = schedule if skips_steps else None  # None: every step, or a point between steps
        self.is_always_due = self._window == ALWAYS and self._schedule is None
        """Whether :meth:`is_due` need not be called: most hooks fire at every step."""
        self.idle = range(0)
        """Steps that are known not to be due: a look-up takes a tenth of the time of a call."""

    @property
    def takes_every_step(self) -> bool:
        """Whether the hook fires at every step of a step-level point, in any epoch."""
        return self.is_always_due and self.point in STEP_POINTS

    def next_due(self, step: int) -> int:
        """Return the first step from ``step`` on that the schedule selects, or an earlier one."""
        return step if self._schedule is None else self._schedule.next_due(step)

    def is_due(self, epoch: int, step: int) -> bool:
        """Return whether the hook fires at this step of this epoch."""
        if not self.in_window(epoch):
            return False
        if self._schedule is None or self._schedule.is_due(step):
            return True
        self.idle = range(step, self._schedule.next_due(step))
        return False

    def start_at(self, epoch: int) -> None:
        """Delay the hook until ``epoch``."""
        first, last = self._window
        self.is_always_due = False
        self._window = (epoch if first is None else max(first, epoch), last)

    def in_window(self, epoch: int) -> bool:
        """Return whether ``epoch`` is in the hook's window at this point."""
        first, last = self._window
        return (first is None or epoch >= first) and (last is None or epoch <= last)


class Listeners:
    """The listeners of a run, by hook point, in the order of their calls."""

    def __init__(self, hooks: Iterable[TrainingHook], loop_type: str) -> None:
        by_point: list[list[Listener]] = [[] for _ in HookPoint]
        hooks = [*hooks]
        self.of_evaluations = [Listener(hook, HookPoint.SNAPSHOT, ALWAYS) for hook in hooks if hook.reports_evaluations]
        """The listeners of evaluations that neither POST_EPOCH nor SNAPSHOT follows."""
        for hook in hooks:
            try:
                windows = windows_for(hook.hook_points, hook.loop_points, loop_type)
            except UsageError as error:
                raise UsageError(f"Hook {hook.name!r}: {error}") from error
            for point, window in windows.items():
                by_point[point].append(Listener(hook, point, window))
        self.at = [sorted(listeners, key=attrgetter("call_order")) for listeners in by_point]
        """The listeners by hook point. A point without listeners costs only this lookup."""
        self.recorded = self._recorded()
        """The listener that is never called, since a record of the loop's values replaces all of its calls."""
        self.first_due = self._unknown_first_due()
        """By point, a step before which no listener is due; 0 if it is not known, as always without a budget."""
        self.of_backward_passes = [
            hook for hook in hooks if type(hook).before_backward is not TrainingHook.before_backward and self.of(hook)
        ]
        """The hooks that are called before backward passes."""

    def reschedule(self) -> None:
        """Use the schedules that the hooks have now."""
        self.first_due = self._unknown_first_due()
        for listener in (item for listeners in self.at for item in listeners):
            listener.reschedule()
        self.recorded = self._recorded()

    def _recorded(self) -> Listener | None:
        """Return the listener of every step whose hook reports values of the loop alone, as ``training_metrics`` does.

        Without it, many visits to POST_STEP would have this hook alone, and cost more than the step of a small model.
        """
        items = (item for item in self.at[HookPoint.POST_STEP] if item.hook.loop_values and item.takes_every_step)
        return next((item for item in items if item.hook.has_fixed_schedule and _reports_as_declared(item.hook)), None)

    def _unknown_first_due(self) -> list[int]:
        return [0 if listeners else sys.maxsize for listeners in self.at]

    def find_first_due(self, point: HookPoint, step: int) -> None:
        """Find the first step from ``step`` on at which a listener of a step-level point may be due."""
        steps = [item.next_due(step) for item in self.at[point] if item is not self.recorded]
        self.first_due[point] = min(steps, default=sys.maxsize)

    def drop(self, hook: TrainingHook) -> None:
        """Remove all listeners of a hook."""
        self.at = [[listener for listener in listeners if listener.hook is not hook] for listeners in self.at]
        self.recorded = self._recorded()
        self.of_evaluations = [listener for listener in self.of_evaluations if listener.hook is not hook]
        self.of_backward_passes = [other for other in self.of_backward_passes if other is not hook]

    def postpone(self, flag: str, points: Iterable[HookPoint], epoch: int) -> None:
        """Delay hooks with the ``flag`` at ``points`` until ``epoch``, and warn about those due in the epoch before."""
        for item in (item for point in points for item in self.at[point] if getattr(item.hook, flag)):
            if item.in_window(epoch - 1):
                reason = f"has {flag}, but epoch {epoch - 1} started without that state"
                warn(f"Hook {item.hook.name!r} {reason}; its first epoch is {epoch}.", RunNotice, stacklevel=2)
            item.start_at(epoch)

    def of(self, hook: TrainingHook) -> list[Listener]:
        """Return the listeners of one hook."""
        return [listener for listeners in self.at for listener in listeners if listener.hook is hook]

    def any_due(self, flag: str, points: Iterable[HookPoint], epoch: int, step: int | None = None) -> bool:
        """Return whether a hook with the ``flag`` fires at one of ``points`` in ``epoch``, or exactly at ``step``."""
        return any(
            getattr(listener.hook, flag)
            and (listener.in_window(epoch) if step is None else listener.is_due(epoch, step))
            for point in points
            for listener in self.at[point]
        )

    def is_scheduled(self, hook: TrainingHook, epoch: int, step: int) -> bool:
        """Return whether ``step`` is in the ``step_schedule`` of a hook; its points do not matter."""
        return hook.step_schedule.is_due(step) and any(item.in_window(epoch) for item in self.of(hook))

    def any_has(self, flag: str) -> bool:
        """Return whether any hook with a listener has the ``flag``."""
        return any(getattr(listener.hook, flag) for listeners in self.at for listener in listeners)


def _reports_as_declared(hook: TrainingHook) -> bool:
    """Return whether no subclass of the class that declares ``loop_values`` has another ``compute``."""
    declaring, computing = (
        next(kind for kind in type(hook).__mro__ if name in vars(kind)) for name in ("loop_values", "compute")
    )
    return issubclass(declaring, computing)
