"""Registries of hooks, sinks and experiments, checks of registered classes, and the selection of hooks."""

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping, MutableSequence, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from ..errors import UsageError, describe_error, require, source_location, unknown, with_lines
from ..registry import Registry, qualified
from .base import InterventionHook, TrainingHook
from .commits import StatePart
from .contexts import metric_table
from .hook_points import POINTS_OF_LOOP, HookPoint, StepSchedule, windows_for
from .metrics import MetricSink

KEYWORDS = ("all", "observers", "with_debug")
"""Keywords of ``--hooks``, in addition to names of hooks."""
OptionsByHook = Mapping[str, Mapping[str, Any]]
GENERATOR_METHODS = ("describe_metrics", "taps")
"""Methods that may be generators."""
GROUPS = ("none", "minimal", "observers", "interventions", "full")


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
    name = getattr(hook, "name", None)
    is_valid_name = isinstance(name, str) and name.replace("_", "").isalnum()
    require(is_valid_name, "needs a name of letters, digits and underscores.")
    require(name not in KEYWORDS, f"is named {name!r}, which is a keyword of --hooks; rename it.")
    is_table = isinstance(hook.metrics, str)
    require(is_table, "has metrics that are not a string with rows 'name | formula | range | reading'.")
    _check_methods(hook)
    by_point = hook.point_schedules
    require(isinstance(by_point, Mapping), f"has point_schedules = {by_point!r}; it must be a dict by hook point.")
    for name, option in inspect.signature(hook, eval_str=True).parameters.items():
        if name not in hook_options(hook) or inspect.Parameter.empty in (option.default, option.annotation):
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
        if getattr(hook, name) is not getattr(base, name):
            _check_method(name, getattr(base, name), hook)


def _check_method(name: str, expected: Callable[..., Any], hook: type[TrainingHook]) -> None:
    arguments = [argument for argument in inspect.signature(expected).parameters if argument != "self"]
    method, takes_self = (
        getattr(hook, name),
        inspect.isfunction(inspect.getattr_static(hook, name)) and name != "leaves",
    )
    is_valid = not inspect.iscoroutinefunction(method) and (
        name in GENERATOR_METHODS or not inspect.isgeneratorfunction(method)
    )
    try:
        inspect.signature(method).bind(*[None] * (takes_self + len(arguments)))
    except (TypeError, ValueError):
        is_valid = False
    form = f"{name}({', '.join(['cls' if name == 'leaves' else 'self', *arguments])})"
    if not is_valid:
        remedy = "it must be a function without yield and async"
        raise UsageError(
            f"has a method {name} [{source_location(method) or method}] that cannot be called; {remedy}: {form}."
        )


def hook_options(hook: type[TrainingHook]) -> dict[str, inspect.Parameter]:
    """Return the keyword-only options of a hook's constructor by name."""
    parameters = inspect.signature(hook, eval_str=True).parameters
    return {name: option for name, option in parameters.items() if option.kind is inspect.Parameter.KEYWORD_ONLY}


def options_of(hook: TrainingHook) -> str:
    """Return a hook's options, if it has attributes of the same names, and its schedule, as text."""
    values = {name.lstrip("_"): value for name, value in vars(hook).items()}
    options = inspect.signature(type(hook)).parameters
    names = [key for key in options if isinstance(values.get(key, ()), (str, float, int))]
    schedule = [] if hook.step_schedule == StepSchedule() else [str(hook.step_schedule)]
    return ", ".join([f"{name}={values[name]}" for name in names] + schedule)


def _declared_points(hook: type[TrainingHook]) -> set[HookPoint]:
    """Return all hook points that the class declares, for both loops."""
    loops: Any = hook.loop_points or {}
    form = "{'epoch': {HookPoint.POST_EPOCH}}"
    require(isinstance(loops, Mapping), f"has loop_points = {loops!r}; it must be a dict, such as {form}.")
    for loop in loops:
        if loop not in POINTS_OF_LOOP:
            raise UsageError(f"has loop_points: {unknown('loop', str(loop), POINTS_OF_LOOP)}")
    points = _members("hook_points", hook.hook_points, HookPoint)
    points = points.union(*(_members("loop_points", entry, HookPoint) for entry in loops.values()))
    try:
        windows_for(points, None, "epoch")
        for loop in loops:
            windows_for(points, loops, loop)
    except UsageError as error:
        raise UsageError(f"cannot be used: {error}") from error
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
    observes = intervening != points and hook.compute is InterventionHook.compute
    require(not observes, "observes outside its intervention_points, so it must define compute().")
    for part in _members("commits", hook.commits, StatePart):
        if not isinstance(part, StatePart):
            members = ", ".join(f"StatePart.{member.name}" for member in StatePart)
            raise UsageError(f"commits {part!r}; its commits must be some of {members}.")


def hook_kind(hook: type[TrainingHook]) -> str:
    """Return the kind of a hook: observer, intervention, committing or debug."""
    if hook.debug:
        return "debug"
    if not issubclass(hook, InterventionHook):
        return "observer"
    return "committing" if hook.commits else "intervention"


def check_sink_class(sink: type[MetricSink]) -> None:
    """Check a sink class; raise :class:`UsageError` with advice if it is invalid."""
    if sink.name == MetricSink.name or not sink.name.replace("_", "").isalnum():
        raise UsageError(f"Sink class {qualified(sink)} needs a name of letters, digits and underscores.")
    if sink.flag is not None and not sink.flag.startswith("--"):
        raise UsageError(f"Sink class {qualified(sink)} has the flag {sink.flag!r}; it must start with two dashes.")
    if sink.option is not None and sink.option not in inspect.signature(sink).parameters:
        raise UsageError(f"Sink class {qualified(sink)} has the option {sink.option!r}, which its constructor lacks.")
    if sink.default and (sink.flag is None or sink.option is not None):
        raise UsageError(f"Sink class {qualified(sink)} is enabled by default, so it needs a flag without an option.")


def check_experiment_class(experiment: type[Any]) -> None:
    """Check an experiment class; raise :class:`UsageError` if it is invalid.

    The class checks itself, because this package must not import the one that defines experiments.
    """
    if not (isinstance(experiment, type) and hasattr(experiment, "check_class")):
        raise UsageError(f"{experiment!r} is not a subclass of ExperimentRunner, so it cannot be an experiment.")
    experiment.check_class()


HookRegistry: Registry[type[TrainingHook]] = Registry("hook", "loopscope.hooks", check_hook_class, TrainingHook)
SinkRegistry: Registry[type[MetricSink]] = Registry("sink", "loopscope.sinks", check_sink_class)
ExperimentRegistry: Registry[type[Any]] = Registry("experiment", "loopscope.experiments", check_experiment_class)


def bulk_hooks(keyword: str) -> list[str]:
    """Return the hooks of ``all`` (or ``full``), ``observers`` or ``interventions``, no debug or committing hooks."""
    kinds = {"observers": {"observer"}, "interventions": {"intervention"}}.get(keyword, {"observer", "intervention"})
    return [hook.name for hook in HookRegistry if hook_kind(hook) in kinds]


def hook_groups(minimal: Sequence[str] = ()) -> dict[str, list[str]]:
    """Return the groups of ``--with-hooks``, which contain no committing and no debug hooks."""
    bulk = {group: bulk_hooks(group) for group in GROUPS if group not in ("none", "minimal")}
    return {"none": [], "minimal": [*always_on(), *minimal], **bulk}


def always_on() -> list[str]:
    """Return the names of the hooks that are active whenever another hook or a sink that keeps metrics is active."""
    return [hook.name for hook in HookRegistry if hook.always]


def select_hooks(
    group: str | None, named: Sequence[str], hook_sets: Mapping[str, Sequence[str]], owner: str
) -> list[str]:
    """Return the names of the hooks in ``--with-hooks GROUP`` and ``--hooks NAME...``, in order, without duplicates.

    Keywords among the names: ``all``, ``observers``, and ``with_debug``, which adds the debug interventions without
    commits. If any hook is selected, hooks that are ``always`` active come first.
    """
    selected: list[str] = []
    if group is not None:
        if group not in hook_sets:
            problem = unknown("group", group, hook_sets)
            raise UsageError(f"Experiment {owner!r} has no hook group of that name: {problem}")
        selected += _checked_group(group, hook_sets[group], owner)
    for name in named:
        if name in ("all", "observers"):
            selected += bulk_hooks(name)
        elif name == "with_debug":
            debug_hooks = [hook for hook in HookRegistry if hook.debug]
            selected += [hook.name for hook in debug_hooks if not (issubclass(hook, InterventionHook) and hook.commits)]
        elif name in hook_sets and name not in HookRegistry.names():
            raise UsageError(f"{name!r} is a group of hooks, not a hook; use --with-hooks {name}.")
        else:
            selected.append(name)
    if selected:
        selected = [*always_on(), *selected]
    return [HookRegistry.get(name, keywords=KEYWORDS).name for name in dict.fromkeys(selected)]


def _checked_group(group: str, names: Sequence[str], owner: str) -> Sequence[str]:
    """Return the names of a group; raise :class:`UsageError` if it contains a committing or debug hook."""
    for name in names:
        kind = hook_kind(HookRegistry.get(name))
        if kind in ("committing", "debug"):
            raise UsageError(
                f"Group {group!r} of experiment {owner!r} contains the {kind} hook {name!r}; enable such "
                f"hooks by name: --hooks {name}."
            )
    return names


def without_duplicates(hooks: Iterable[TrainingHook]) -> list[TrainingHook]:
    """Return the hooks as a list.

    Raises:
        UsageError: an object is not a hook, or two hooks have the same name.
    """
    by_name: dict[str, TrainingHook] = {}
    for hook in hooks:
        if not isinstance(hook, TrainingHook):
            name = hook if isinstance(hook, str) else str(getattr(hook, "__name__", "NAME"))
            remedy = f"create it with {name}(), or HookRegistry.get({name!r})() if it is registered"
            raise UsageError(f"{hook!r} is not a hook object; {remedy}.")
        if hook.name in by_name:
            raise UsageError(
                f"Two hooks are named {hook.name!r}: {qualified(type(by_name[hook.name]))} and "
                f"{qualified(type(hook))}; names must be unique, because metrics and states are keyed by them."
            )
        by_name[hook.name] = hook
    return list(by_name.values())


@dataclass(frozen=True)
class ConfiguredHook:
    """A hook and the options that it was created with, including defaults."""

    hook: TrainingHook
    options: Mapping[str, Any]


def build_hooks(
    names: Iterable[str | type[TrainingHook]],
    user_options: OptionsByHook,
    strategy_options: OptionsByHook,
    existing: MutableSequence[ConfiguredHook],
    *,
    required: Collection[str] | None = None,
    left_out: MutableMapping[str, str] | None = None,
) -> list[ConfiguredHook]:
    """Create the hooks of one strategy, by name or class; the user's options override those of the strategy.

    Hooks in ``existing``, created for an earlier strategy with the same options, are reused; new ones are appended. If
    a hook that is not ``required`` (default: all are) cannot be created without options, ``left_out`` receives the
    reason.

    Raises:
        UsageError: a name or option is unknown, or a hook refuses a value.
    """
    configured = []
    for item in names:
        hook = HookRegistry.get(item) if isinstance(item, str) else item
        options = {**strategy_options.get(hook.name, {}), **user_options.get(hook.name, {})}
        try:
            check_hook_class(hook)
            configured.append(_configured_hook(hook, options, existing))
        except UsageError as error:
            if left_out is None or required is None or hook.name in required or options:
                raise
            left_out[hook.name] = str(error)
    return configured


def refuse_idle_options(user_options: OptionsByHook, active: Collection[str]) -> None:
    """Raise :class:`UsageError` for options of a hook that is inactive in all strategies."""
    for name in user_options:
        if name not in active:
            HookRegistry.get(name)
            remedy = f"add --hooks {name} (attach: hooks=[{name!r}])"
            raise UsageError(f"Hook {name!r} has options, but is not enabled; {remedy}.")


def _configured_hook(
    hook_class: type[TrainingHook], options: Mapping[str, Any], existing: MutableSequence[ConfiguredHook]
) -> ConfiguredHook:
    name, parameters = hook_class.name, hook_options(hook_class)
    for option in options:
        if option not in parameters:
            raise unknown(f"option of hook {name!r}:", option, parameters)
    complete = {option: parameter.default for option, parameter in parameters.items()} | dict(options)
    for earlier in existing:
        if type(earlier.hook) is hook_class and earlier.options == complete:
            return earlier
    try:
        configured = ConfiguredHook(hook_class(**options), complete)
    except UsageError as error:
        raise UsageError(f"Hook {name!r}: {error}") from error
    except (Exception, SystemExit) as error:
        arguments = ", ".join(f"{option}={value!r}" for option, value in options.items())
        raise UsageError(f"Hook {name!r} cannot be created with ({arguments}): {with_lines(error)}.") from error
    existing.append(configured)
    return configured
