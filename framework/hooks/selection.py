"""The registries of hooks, sinks and experiments, what they refuse, and the way from a selection to hook objects."""

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping, MutableSequence, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from ..errors import UsageError, place_of, require, told, unknown, with_lines
from ..registry import Registry, qualified
from .base import InterventionHook, TrainingHook
from .commits import StatePart
from .contexts import metric_table
from .hook_points import POINTS_OF_LOOP, HookPoint, StepSchedule, windows_for
from .metrics import MetricSink

KEYWORDS = ("all", "observers", "with_debug")
"""Words that ``--hooks`` takes beside the names of hooks."""
OptionsByHook = Mapping[str, Mapping[str, Any]]
YIELDING = ("describe_metrics", "taps")
"""Methods that may be generators."""
GROUPS = ("none", "minimal", "observers", "interventions", "full")


def check_hook_class(hook: type[TrainingHook]) -> None:
    """Refuse a hook class that could not work; raises :class:`UsageError` that says what to change."""
    if not (isinstance(hook, type) and issubclass(hook, TrainingHook)):
        raise UsageError(f"{hook!r} is not a subclass of TrainingHook, so it cannot be a hook.")
    try:
        _check_declarations(hook)
    except Exception as error:
        place = place_of(hook).partition(" in ")[0]
        label = f"Hook class {qualified(hook)}" + (f" ({place})" if place else "")
        sentence = str(error) if isinstance(error, UsageError) else f"cannot be used: {told(error)}."
        raise UsageError(f"{label} {sentence}") from error


def _check_declarations(hook: type[TrainingHook]) -> None:
    name = getattr(hook, "name", None)
    named = isinstance(name, str) and name.replace("_", "").isalnum()
    require(named, "needs a name of letters, digits and underscores.")
    require(name not in KEYWORDS, f"is named {name!r}, which is a keyword of --hooks; rename it.")
    of_text = isinstance(hook.metrics, str)
    require(of_text, "has metrics that are no text with a row 'name | formula | range | reading' for each.")
    _check_methods(hook)
    by_point = hook.point_schedules
    require(isinstance(by_point, Mapping), f"has point_schedules = {by_point!r}; they are a dict by hook point.")
    for name, option in inspect.signature(hook, eval_str=True).parameters.items():
        if name not in hook_options(hook) or inspect.Parameter.empty in (option.default, option.annotation):
            remedy = f"an option must be keyword-only, annotated, and have a default: (self, *, {name}: int = 1)"
            raise UsageError(f"takes {name!r}; {remedy}.")
    points = _points(hook)
    if issubclass(hook, InterventionHook):
        _check_intervention_class(hook, points)


def _check_methods(hook: type[TrainingHook]) -> None:
    """Refuse a class that lacks a method, or has one that cannot be called as it will be."""
    base = InterventionHook if issubclass(hook, InterventionHook) else TrainingHook
    stray = {"commits", "intervene"} & {*dir(hook)} - {*dir(base)}
    remedy = "derive it from InterventionHook and define intervene(self, run_ctx, model_ctx)"
    require(not stray, f"has {' and '.join(sorted(stray))}, but is an observer; {remedy}.")
    missing = set(hook.__abstractmethods__)
    if hook.describe_metrics is TrainingHook.describe_metrics and not metric_table(hook.metrics):
        missing.add("describe_metrics")
    hint = " (or a text metrics)" if "describe_metrics" in missing else ""
    require(not missing, f"must define {', '.join(f'{name}()' for name in sorted(missing))}{hint}.")
    for name in [name for name in dir(base) if not name.startswith("_") and callable(getattr(base, name))]:
        if getattr(hook, name) is not getattr(base, name):
            _check_method(name, getattr(base, name), hook)


def _check_method(name: str, expected: Callable[..., Any], hook: type[TrainingHook]) -> None:
    arguments = [argument for argument in inspect.signature(expected).parameters if argument != "self"]
    own, takes_self = getattr(hook, name), inspect.isfunction(inspect.getattr_static(hook, name)) and name != "leaves"
    fits = not inspect.iscoroutinefunction(own) and (name in YIELDING or not inspect.isgeneratorfunction(own))
    try:
        inspect.signature(own).bind(*[None] * (takes_self + len(arguments)))
    except (TypeError, ValueError):
        fits = False
    form = f"{name}({', '.join(['cls' if name == 'leaves' else 'self', *arguments])})"
    if not fits:
        remedy = "it must be a function without yield and async"
        raise UsageError(f"has a method {name} [{place_of(own) or own}] that cannot be called; {remedy}: {form}.")


def hook_options(hook: type[TrainingHook]) -> dict[str, inspect.Parameter]:
    """Return the keyword-only options of a hook's constructor by name."""
    parameters = inspect.signature(hook, eval_str=True).parameters
    return {name: option for name, option in parameters.items() if option.kind is inspect.Parameter.KEYWORD_ONLY}


def options_of(hook: TrainingHook) -> str:
    """Return the options that a hook was made with, as far as its attributes have their names, and its schedule."""
    held = {name.lstrip("_"): value for name, value in vars(hook).items()}
    own = [key for key in inspect.signature(type(hook)).parameters if isinstance(held.get(key, ()), (str, float, int))]
    schedule = [] if hook.step_schedule == StepSchedule() else [str(hook.step_schedule)]
    return ", ".join([f"{name}={held[name]}" for name in own] + schedule)


def _points(hook: type[TrainingHook]) -> set[HookPoint]:
    """Return every point that the class names, for either loop."""
    loops: Any = hook.loop_points or {}
    form = "{'epoch': {HookPoint.POST_EPOCH}}"
    require(isinstance(loops, Mapping), f"has loop_points = {loops!r}; they are a dict, such as {form}.")
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
    known = ", ".join(point.name for point in HookPoint)
    require(bool(points), f"fires nowhere; set hook_points to some of HookPoint: {known}.")
    return points


def _members(attribute: str, value: Any, kind: type[Enum]) -> set[Any]:
    """Return what a class names as a set; raises :class:`UsageError` for a text, or for one member without a set."""
    if isinstance(value, (kind, str)) or not isinstance(value, Iterable):
        name = value.name if isinstance(value, kind) else str(value).upper().rpartition(".")[2]
        example = f"{kind.__name__}.{name if name in kind.__members__ else next(iter(kind)).name}"
        raise UsageError(f"has {attribute} = {value!r}; it must be a set: {attribute} = {{{example}}}.")
    return set(value)


def _check_intervention_class(hook: type[InterventionHook], points: set[HookPoint]) -> None:
    named = hook.intervention_points
    where = points if named is None else _members("intervention_points", named, HookPoint)
    stray = ", ".join(sorted(str(getattr(point, "name", point)) for point in where - points))
    require(not stray, f"intervenes at {stray}, which is not among its hook_points.")
    require(HookPoint.PRE_UPDATE not in where, "intervenes at PRE_UPDATE, which is for observers; use POST_BACKWARD.")
    observes = where != points and hook.compute is InterventionHook.compute
    require(not observes, "observes outside its intervention_points, so it must define compute().")
    for part in _members("commits", hook.commits, StatePart):
        if not isinstance(part, StatePart):
            known = ", ".join(f"StatePart.{known.name}" for known in StatePart)
            raise UsageError(f"commits {part!r}; its commits must be some of {known}.")


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


def check_experiment_class(experiment: type[Any]) -> None:
    """Refuse what is no experiment class, or could not work; the rules are its own, since they lie in a higher room."""
    if not (isinstance(experiment, type) and hasattr(experiment, "check_class")):
        raise UsageError(f"{experiment!r} is not a subclass of ExperimentRunner, so it cannot be an experiment.")
    experiment.check_class()


HookRegistry: Registry[type[TrainingHook]] = Registry("hook", "loopscope.hooks", check_hook_class, TrainingHook)
SinkRegistry: Registry[type[MetricSink]] = Registry("sink", "loopscope.sinks", check_sink_class)
ExperimentRegistry: Registry[type[Any]] = Registry("experiment", "loopscope.experiments", check_experiment_class)


def bulk_hooks(keyword: str) -> list[str]:
    """Expand ``all`` (or ``full``), ``observers``, ``interventions``: never debug hooks, never hooks with commits."""
    kinds = {"observers": {"observer"}, "interventions": {"intervention"}}.get(keyword, {"observer", "intervention"})
    return [hook.name for hook in HookRegistry if hook_kind(hook) in kinds]


def hook_groups(minimal: Sequence[str] = ()) -> dict[str, list[str]]:
    """Return the groups of ``--with-hooks``; none of them contains a committing or a debug hook."""
    bulk = {group: bulk_hooks(group) for group in GROUPS if group not in ("none", "minimal")}
    return {"none": [], "minimal": [*always_on(), *minimal], **bulk}


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
            known = unknown("group", group, hook_sets)
            raise UsageError(f"Experiment {owner!r} has no hook group of that name: {known}")
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
    """Return the hooks as a list; raises :class:`UsageError` for what is no hook, and when two share a name."""
    by_name: dict[str, TrainingHook] = {}
    for hook in hooks:
        if not isinstance(hook, TrainingHook):
            name = hook if isinstance(hook, str) else str(getattr(hook, "__name__", "NAME"))
            remedy = f"make it of its class: {name}(), or HookRegistry.get({name!r})() for a registered one"
            raise UsageError(f"A hook is an object, but got {hook!r}: {remedy}.")
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
    names: Iterable[str | type[TrainingHook]],
    given: OptionsByHook,
    of_the_strategy: OptionsByHook,
    made: MutableSequence[ConfiguredHook],
    *,
    required: Collection[str] | None = None,
    left_out: MutableMapping[str, str] | None = None,
) -> list[ConfiguredHook]:
    """Make the hooks of one strategy, by name or class; the user's options win over those of the strategy.

    What is not ``required`` (by default all is) and cannot be made without options goes into ``left_out``, with the
    reason.

    A hook that was ``made`` for an earlier strategy with the same options serves again; new ones are added there.
    Raises :class:`UsageError` for an unknown name or option, and for a value that the hook refuses.
    """
    found = []
    for item in names:
        hook = HookRegistry.get(item) if isinstance(item, str) else item
        options = {**of_the_strategy.get(hook.name, {}), **given.get(hook.name, {})}
        try:
            check_hook_class(hook)
            found.append(_configured(hook, options, made))
        except UsageError as error:
            if left_out is None or required is None or hook.name in required or options:
                raise
            left_out[hook.name] = str(error)
    return found


def refuse_idle_options(given: OptionsByHook, active: Collection[str]) -> None:
    """Raise :class:`UsageError` for options of a hook that is on in none of the strategies."""
    for name in given:
        if name not in active:
            HookRegistry.get(name)
            remedy = f"add --hooks {name} (attach: hooks=[{name!r}])"
            raise UsageError(f"Options are given for hook {name!r}, which is not on; {remedy}.")


def _configured(
    hook_class: type[TrainingHook], options: Mapping[str, Any], made: MutableSequence[ConfiguredHook]
) -> ConfiguredHook:
    name, known = hook_class.name, hook_options(hook_class)
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
    except (Exception, SystemExit) as error:
        given = ", ".join(f"{option}={value!r}" for option, value in options.items())
        raise UsageError(f"Hook {name!r} cannot be made with ({given}): {with_lines(error)}.") from error
    made.append(configured)
    return configured
