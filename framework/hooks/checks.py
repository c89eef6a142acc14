"""What makes a hook class fit to be registered, checked before any run."""

import inspect
from collections.abc import Mapping
from typing import Any

from ..errors import UsageError, unknown
from ..registry import qualified
from .base import InterventionHook, TrainingHook
from .commits import StatePart
from .contexts import metric_table
from .hook_points import POINTS_OF_LOOP, HookPoint, windows_for

KEYWORDS = ("all", "observers", "with_debug")
"""Words that ``--hooks`` takes beside the names of hooks."""


def check_hook_class(hook: type[TrainingHook]) -> None:
    """Refuse a hook class that could not work; raises :class:`UsageError` that says what to change."""
    if not (isinstance(hook, type) and issubclass(hook, TrainingHook)):
        raise UsageError(f"{hook!r} is not a subclass of TrainingHook, so it cannot be a hook.")
    label = f"Hook class {qualified(hook)}"
    if not isinstance(getattr(hook, "name", None), str) or not hook.name.replace("_", "").isalnum():
        raise UsageError(f"{label} needs a name of letters, digits and underscores.")
    if hook.name in KEYWORDS:
        raise UsageError(f"{label} is named {hook.name!r}, which is a keyword of --hooks; rename it.")
    missing = set(hook.__abstractmethods__)
    if hook.describe_metrics is TrainingHook.describe_metrics and not metric_table(hook.metrics):
        missing.add("describe_metrics")
    if missing:
        raise UsageError(f"{label} must define {', '.join(f'{name}()' for name in sorted(missing))}.")
    for name, option in inspect.signature(hook).parameters.items():
        if name not in hook_options(hook) or inspect.Parameter.empty in (option.default, option.annotation):
            raise UsageError(f"{label} takes {name!r}; an option must be keyword-only, annotated, and have a default.")
    points = _points(label, hook)
    if issubclass(hook, InterventionHook):
        _check_intervention_class(label, hook, points)


def hook_options(hook: type[TrainingHook]) -> dict[str, inspect.Parameter]:
    """Return the keyword-only options of a hook's constructor by name."""
    parameters = inspect.signature(hook).parameters
    return {name: option for name, option in parameters.items() if option.kind is inspect.Parameter.KEYWORD_ONLY}


def _points(label: str, hook: type[TrainingHook]) -> set[HookPoint]:
    """Return every point that the class names, for either loop."""
    loops: Mapping[str, Any] = hook.loop_points or {}
    for loop in loops:
        if loop not in POINTS_OF_LOOP:
            raise UsageError(f"{label} has loop_points: {unknown('loop', loop, POINTS_OF_LOOP)}")
    points = set(hook.hook_points).union(*loops.values())
    try:
        windows_for(points, None, "epoch")
        for loop in loops:
            windows_for(points, loops, loop)
    except UsageError as error:
        raise UsageError(f"{label}: {error}") from error
    if not points:
        known = ", ".join(point.name for point in HookPoint)
        raise UsageError(f"{label} fires nowhere; set hook_points to some of HookPoint: {known}.")
    return points


def _check_intervention_class(label: str, hook: type[InterventionHook], points: set[HookPoint]) -> None:
    where = points if hook.intervention_points is None else set(hook.intervention_points)
    if not where <= points:
        stray = ", ".join(sorted(str(getattr(point, "name", point)) for point in where - points))
        raise UsageError(f"{label} intervenes at {stray}, which is not among its hook_points.")
    if HookPoint.PRE_UPDATE in where:
        raise UsageError(f"{label} intervenes at PRE_UPDATE, which is for observers; use POST_BACKWARD.")
    if where != points and hook.compute is InterventionHook.compute:
        raise UsageError(f"{label} observes outside its intervention_points, so it must define compute().")
    for part in hook.commits:
        if not isinstance(part, StatePart):
            known = ", ".join(f"StatePart.{known.name}" for known in StatePart)
            raise UsageError(f"{label} commits {part!r}; its commits must be some of {known}.")


def hook_kind(hook: type[TrainingHook]) -> str:
    """Name the kind of a hook: observer, intervention, committing or debug."""
    if hook.debug:
        return "debug"
    if not issubclass(hook, InterventionHook):
        return "observer"
    return "committing" if hook.commits else "intervention"
