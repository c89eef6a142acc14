"""The registries of hooks, sinks and experiments, what they refuse, and the way from a selection to hook objects."""

import inspect
from collections.abc import Collection, Iterable, Mapping, MutableSequence, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import UsageError, unknown
from ..registry import Registry, qualified
from .base import InterventionHook, TrainingHook
from .commits import StatePart
from .contexts import metric_table
from .hook_points import POINTS_OF_LOOP, HookPoint, windows_for
from .metrics import MetricSink

KEYWORDS = ("all", "observers", "with_debug")
"""Words that ``--hooks`` takes beside the names of hooks."""
OptionsByHook = Mapping[str, Mapping[str, Any]]
GROUPS = ("none", "minimal", "observers", "interventions", "full")


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


def check_sink_class(sink: type[MetricSink]) -> None:
    """Refuse a sink class that could not work; raises :class:`UsageError` that says what to change."""
    if sink.name == MetricSink.name or not sink.name.replace("_", "").isalnum():
        raise UsageError(f"Sink class {qualified(sink)} needs a name of its own, of letters, digits and underscores.")
    if sink.flag is not None and not sink.flag.startswith("--"):
        raise UsageError(f"Sink class {qualified(sink)} has the flag {sink.flag!r}; it must begin with two dashes.")
    if sink.option is not None and sink.option not in inspect.signature(sink).parameters:
        raise UsageError(f"Sink class {qualified(sink)} has the option {sink.option!r}, which its constructor lacks.")
    if sink.default and (sink.flag is None or sink.option is not None):
        raise UsageError(f"Sink class {qualified(sink)} is on by default, so it needs a flag that is a switch.")


HookRegistry: Registry[type[TrainingHook]] = Registry("hook", "loopscope.hooks", check_hook_class)
SinkRegistry: Registry[type[MetricSink]] = Registry("sink", "loopscope.sinks", check_sink_class)
ExperimentRegistry: Registry[type[Any]] = Registry("experiment", "loopscope.experiments", lambda entry: None)


def bulk_hooks(keyword: str) -> list[str]:
    """Expand ``all`` (or ``full``), ``observers``, ``interventions``: never debug hooks, never hooks with commits."""
    kinds = {"observers": {"observer"}, "interventions": {"intervention"}}.get(keyword, {"observer", "intervention"})
    return [hook.name for hook in HookRegistry if hook_kind(hook) in kinds]


def always_on() -> list[str]:
    """Name the hooks that are on whenever any hook is, or any sink that keeps what it is given."""
    return [hook.name for hook in HookRegistry if hook.always]


def select_hooks(
    group: str | None, named: Sequence[str], hook_sets: Mapping[str, Sequence[str]], owner: str
) -> list[str]:
    """Expand ``--with-hooks GROUP`` and ``--hooks NAME...`` into hook names, in order, each once.

    Keywords among the names: ``all``, ``observers``, and ``with_debug``, which adds the debug interventions that
    commit nothing.
    Hooks that are ``always`` on lead whenever any hook is on.
    """
    chosen: list[str] = []
    if group is not None:
        if group not in hook_sets:
            raise UsageError(
                f"Experiment {owner!r} has no hook group of that name: {unknown('group', group, hook_sets)}"
            )
        chosen += _checked_group(group, hook_sets[group], owner)
    for name in named:
        if name in ("all", "observers"):
            chosen += bulk_hooks(name)
        elif name == "with_debug":
            debugging = [hook for hook in HookRegistry if hook.debug]
            chosen += [each.name for each in debugging if not (issubclass(each, InterventionHook) and each.commits)]
        elif name in hook_sets and name not in HookRegistry.names():
            raise UsageError(f"{name!r} is no hook, but a group of hooks: --with-hooks {name}.")
        else:
            chosen.append(name)
    if chosen:
        chosen = [*always_on(), *chosen]
    return [HookRegistry.get(name, keywords=KEYWORDS).name for name in dict.fromkeys(chosen)]


def _checked_group(group: str, names: Sequence[str], owner: str) -> Sequence[str]:
    """Return the names of a group; raises :class:`UsageError` if it would change the run or debug it unasked."""
    for name in names:
        kind = hook_kind(HookRegistry.get(name))
        if kind in ("committing", "debug"):
            raise UsageError(
                f"Group {group!r} of experiment {owner!r} contains the {kind} hook {name!r}; such hooks are switched "
                f"on by name only: --hooks {name}."
            )
    return names


def without_duplicates(hooks: Iterable[TrainingHook]) -> list[TrainingHook]:
    """Return the hooks as a list; raises :class:`UsageError` when two share a name."""
    by_name: dict[str, TrainingHook] = {}
    for hook in hooks:
        if hook.name in by_name:
            raise UsageError(
                f"Two hooks are named {hook.name!r}: {qualified(type(by_name[hook.name]))} and "
                f"{qualified(type(hook))}; names must be unique, since metrics and states are keyed by them."
            )
        by_name[hook.name] = hook
    return list(by_name.values())


@dataclass(frozen=True)
class ConfiguredHook:
    """A hook with the options it was made with, defaults included."""

    hook: TrainingHook
    options: Mapping[str, Any]


def build_hooks(
    names: Iterable[str], given: OptionsByHook, of_the_strategy: OptionsByHook, made: MutableSequence[ConfiguredHook]
) -> list[ConfiguredHook]:
    """Make the hooks of one strategy; the user's options win over those of the strategy.

    A hook that was ``made`` for an earlier strategy with the same options serves again; new ones are added there.
    Raises :class:`UsageError` for an unknown name or option, and for a value that the hook refuses.
    """
    return [_configured(name, {**of_the_strategy.get(name, {}), **given.get(name, {})}, made) for name in names]


def refuse_idle_options(given: OptionsByHook, active: Collection[str]) -> None:
    """Raise :class:`UsageError` for options of a hook that is on in none of the strategies."""
    for name in given:
        if name not in active:
            HookRegistry.get(name)
            raise UsageError(f"Options are given for hook {name!r}, which is not on; add --hooks {name}.")


def _configured(name: str, options: Mapping[str, Any], made: MutableSequence[ConfiguredHook]) -> ConfiguredHook:
    hook_class = HookRegistry.get(name)
    known = hook_options(hook_class)
    for option in options:
        if option not in known:
            raise unknown(f"option of hook {name!r}:", option, known)
    complete = {option: parameter.default for option, parameter in known.items()} | dict(options)
    for earlier in made:
        if type(earlier.hook) is hook_class and earlier.options == complete:
            return earlier
    try:
        configured = ConfiguredHook(hook_class(**options), complete)
    except UsageError as error:
        raise UsageError(f"Hook {name!r}: {error}") from error
    made.append(configured)
    return configured
