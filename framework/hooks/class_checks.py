"""The registry of hooks, and the checks of their classes."""

import inspect
from collections.abc import Iterable
from enum import Enum
from typing import Any

from ..errors import UsageError, describe_error, require, source_location, unknown
from ..registry import Registry, qualified
from .base import InterventionHook, TrainingHook
from .commits import StatePart
from .contexts import metric_table
from .hook_points import POINTS_OF_LOOP, HookPoint, windows_for
from .registries import is_name


def check_hook_class(hook: type[TrainingHook]) -> None:
    """Check a hook class; raise :class:`UsageError` with advice if it is invalid."""
    if not (isinstance(hook, type) and issubclass(hook, TrainingHook)):
        raise UsageError(f"{hook!r} is not a subclass of TrainingHook, so it cannot be a hook.")
    try:
        _check_declarations(hook)
    except Exception as error:
        location = source_location(hook).partition(" in ")[0]
        label = f"Hook class {qualified(hook)}" + (f" ({location})" if location else "")
        sentence = str(error) if isinstance(error, UsageError) else f"cannot be used: {describe_error(error)}."
        raise UsageError(f"{label} {sentence}") from error


def _check_declarations(hook: type[TrainingHook]) -> None:
    require(is_name(getattr(hook, "name", None)), "needs a name of letters, digits and underscores.")
    _check_methods(hook)
    for name, option in inspect.signature(hook, eval_str=True).parameters.items():
        if option.kind is not inspect.Parameter.KEYWORD_ONLY or inspect.Parameter.empty in (
            option.default,
            option.annotation,
        ):
            remedy = f"an option must be keyword-only, annotated, and have a default: (self, *, {name}: int = 1)"
            raise UsageError(f"takes {name!r}; {remedy}.")
    points = _declared_points(hook)
    if issubclass(hook, InterventionHook):
        _check_intervention_class(hook, points)


def _check_methods(hook: type[TrainingHook]) -> None:
    """Check that a class has all required methods, with the signatures of the base class."""
    base = InterventionHook if issubclass(hook, InterventionHook) else TrainingHook
    misplaced = {"commits", "intervene"} & {*dir(hook)} - {*dir(base)}
    remedy = "derive it from InterventionHook and define intervene(self, run_ctx, model_ctx)"
    require(not misplaced, f"has {' and '.join(sorted(misplaced))}, but is an observer; {remedy}.")
    missing = set(hook.__abstractmethods__)
    if hook.describe_metrics is TrainingHook.describe_metrics and not metric_table(hook.metrics):
        missing.add("describe_metrics")
    hint = " (or a table metrics)" if "describe_metrics" in missing else ""
    require(not missing, f"must define {', '.join(f'{name}()' for name in sorted(missing))}{hint}.")
    for name in [name for name in dir(base) if not name.startswith("_") and callable(getattr(base, name))]:
        expected, method = getattr(base, name), getattr(hook, name)
        if method is expected or getattr(method, "__func__", method) is getattr(expected, "__func__", expected):
            continue
        arguments = inspect.signature(expected).parameters
        try:
            inspect.signature(method).bind(*arguments)
        except TypeError as error:
            place = source_location(method) or method
            raise UsageError(
                f"has a method {name} [{place}] that cannot be called; it must be {name}({', '.join(arguments)})."
            ) from error


def hook_options(hook: type[TrainingHook]) -> dict[str, inspect.Parameter]:
    """Return the keyword-only options of a hook's constructor by name."""
    parameters = inspect.signature(hook, eval_str=True).parameters
    return {name: option for name, option in parameters.items() if option.kind is inspect.Parameter.KEYWORD_ONLY}


def _declared_points(hook: type[TrainingHook]) -> set[HookPoint]:
    """Return all hook points that the class declares, for both loops."""
    points = _members("hook_points", hook.hook_points, HookPoint)
    windows_for(points, None, "epoch")
    for loop, entry in (hook.loop_points or {}).items():
        if loop not in POINTS_OF_LOOP:
            raise UsageError(f"has loop_points: {unknown('loop', str(loop), POINTS_OF_LOOP)}")
        windows_for(points, hook.loop_points, loop)
        points = points | {*entry}
    names = ", ".join(point.name for point in HookPoint)
    require(bool(points), f"fires nowhere; set hook_points to a set of HookPoint members: {names}.")
    return points


def _members(attribute: str, value: Any, kind: type[Enum]) -> set[Any]:
    """Return a class attribute as a set; raise :class:`UsageError` for a string or a single member."""
    if isinstance(value, (kind, str)) or not isinstance(value, Iterable):
        name = value.name if isinstance(value, kind) else str(value).upper().rpartition(".")[2]
        example = f"{kind.__name__}.{name if name in kind.__members__ else next(iter(kind)).name}"
        raise UsageError(f"has {attribute} = {value!r}; it must be a set: {attribute} = {{{example}}}.")
    return set(value)


def _check_intervention_class(hook: type[InterventionHook], points: set[HookPoint]) -> None:
    declared = hook.intervention_points
    intervening = points if declared is None else _members("intervention_points", declared, HookPoint)
    missing = ", ".join(sorted(str(getattr(point, "name", point)) for point in intervening - points))
    require(not missing, f"intervenes at {missing}, which is not among its hook_points.")
    is_allowed = HookPoint.PRE_UPDATE not in intervening
    require(is_allowed, "intervenes at PRE_UPDATE, which is for observers; use POST_BACKWARD.")
    for part in _members("commits", hook.commits, StatePart):
        if not isinstance(part, StatePart):
            members = ", ".join(f"StatePart.{member.name}" for member in StatePart)
            raise UsageError(f"commits {part!r}; its commits must be some of {members}.")


HookRegistry: Registry[type[TrainingHook]] = Registry(
    "hook",
    "loopscope.hooks",
    check_hook_class,
    TrainingHook,
    {
        "laws": "loopscope.laws.hook",
        "layout_numbers": "loopscope.laws.layout_numbers",
        "moved_weights": "loopscope.laws.layout_numbers",
    },
)
