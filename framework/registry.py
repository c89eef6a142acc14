"""The registries of hooks and experiments, and the expansion of what a user selects."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.metadata import entry_points
from typing import Any, Generic, TypeVar

from framework.errors import UsageError, unknown
from framework.hook_points import HookPoint
from framework.hooks import InterventionHook, TrainingHook
from framework.metrics import MetricSink

Entry = TypeVar("Entry", bound=type[Any])
GROUPS = ("none", "minimal", "observers", "interventions", "full")


class Registry(Generic[Entry]):
    """Classes by their unique ``name``."""

    def __init__(self, kind: str, entry_point_group: str, check: Callable[[Entry], None]) -> None:
        self._kind = kind
        self._group = entry_point_group
        self._check = check
        self._entries: dict[str, Entry] = {}
        self._discovered = False

    def register(self, entry: Entry) -> Entry:
        """Add a class (a decorator); raises :class:`UsageError` for a malformed class or a name already taken."""
        self._check(entry)
        present = self._entries.get(entry.name)
        if present is not None and present is not entry:
            raise UsageError(
                f"Two {self._kind}s are named {entry.name!r}: {_where(present)} and {_where(entry)}; rename one of them."
            )
        self._entries[entry.name] = entry
        return entry

    def unregister(self, name: str) -> None:
        """Forget a class again."""
        self._entries.pop(name, None)

    def discover(self) -> None:
        """Register what installed packages offer under the entry-point group; nothing is switched on by that."""
        if self._discovered:
            return
        self._discovered = True
        for point in entry_points(group=self._group):
            try:
                self.register(point.load())
            except UsageError:
                raise
            except Exception as error:
                raise UsageError(
                    f"The {self._kind} {point.name!r} ({point.value}) cannot be loaded: {error}."
                ) from error

    def get(self, name: str) -> Entry:
        """Return the class called ``name``; raises :class:`UsageError` with the nearest name."""
        self.discover()
        if name not in self._entries:
            raise unknown(self._kind, name, self._entries)
        return self._entries[name]

    def __iter__(self) -> Iterator[Entry]:
        """Iterate over the classes, by name."""
        self.discover()
        return iter([self._entries[name] for name in sorted(self._entries)])

    def names(self) -> list[str]:
        """List the names, sorted."""
        return [entry.name for entry in self]


def _where(entry: type) -> str:
    return f"{entry.__module__}.{entry.__qualname__}"


def check_hook_class(hook: type[TrainingHook]) -> None:
    """Refuse a hook class that could not work; raises :class:`UsageError` that says what to change."""
    label = f"Hook class {_where(hook)}"
    if not isinstance(getattr(hook, "name", None), str) or not hook.name.replace("_", "").isalnum():
        raise UsageError(f"{label} needs a name of letters, digits and underscores.")
    if hook.name in {"all", "observers", "with_debug"}:
        raise UsageError(f"{label} is named {hook.name!r}, which is a keyword of --hooks; rename it.")
    points = set(getattr(hook, "hook_points", ()))
    for loop, entry in (hook.loop_points or {}).items():
        if loop not in ("epoch", "step"):
            raise UsageError(f"{label} names the loop {loop!r} in loop_points. Known: epoch, step.")
        points |= set(entry)
    if not points or not all(isinstance(point, HookPoint) for point in points):
        known = ", ".join(point.name for point in HookPoint)
        raise UsageError(
            f"{label} has hook_points {sorted(map(str, points))}; they must be some of HookPoint: {known}."
        )
    if issubclass(hook, InterventionHook):
        _check_intervention_class(label, hook, points)


def _check_intervention_class(label: str, hook: type[InterventionHook], points: set[HookPoint]) -> None:
    where = points if hook.intervention_points is None else set(hook.intervention_points)
    if not where <= points:
        stray = ", ".join(sorted(point.name for point in where - points))
        raise UsageError(f"{label} intervenes at {stray}, which is not among its hook_points.")
    if HookPoint.PRE_UPDATE in where:
        raise UsageError(f"{label} intervenes at PRE_UPDATE, which is for observers; use POST_BACKWARD.")
    if where != points and hook.compute is InterventionHook.compute:
        raise UsageError(f"{label} observes outside its intervention_points, so it must define compute().")


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
        raise UsageError(f"Sink class {_where(sink)} needs a name of its own, of letters, digits and underscores.")
    if sink.flag is not None and not sink.flag.startswith("--"):
        raise UsageError(f"Sink class {_where(sink)} has the flag {sink.flag!r}; it must begin with two dashes.")


HookRegistry: Registry[type[TrainingHook]] = Registry("hook", "loopscope.hooks", check_hook_class)
SinkRegistry: Registry[type[MetricSink]] = Registry("sink", "loopscope.sinks", check_sink_class)
ExperimentRegistry: Registry[type[Any]] = Registry("experiment", "loopscope.experiments", lambda entry: None)


def bulk_hooks(keyword: str) -> list[str]:
    """Expand ``all`` (or ``full``), ``observers``, ``interventions``: never debug hooks, never hooks with commits."""
    kinds = {"observers": {"observer"}, "interventions": {"intervention"}}.get(keyword, {"observer", "intervention"})
    return [hook.name for hook in HookRegistry if hook_kind(hook) in kinds]


def select_hooks(
    group: str | None, named: Sequence[str], hook_sets: Mapping[str, Sequence[str]], owner: str
) -> list[str]:
    """Expand ``--with-hooks GROUP`` and ``--hooks NAME...`` into hook names, in order, each once.

    Keywords among the names: ``all``, ``observers``, and ``with_debug``, which adds the debug interventions.
    ``training_metrics`` leads whenever any hook is on.
    """
    chosen: list[str] = []
    if group is not None:
        if group not in hook_sets:
            raise UsageError(
                f"Experiment {owner!r} has no hook group of that name: {unknown('group', group, hook_sets)}"
            )
        chosen += hook_sets[group]
    for name in named:
        if name in ("all", "observers"):
            chosen += bulk_hooks(name)
        elif name == "with_debug":
            chosen += [hook.name for hook in HookRegistry if hook.debug]
        else:
            chosen.append(name)
    if chosen:
        chosen.insert(0, "training_metrics")
    return [HookRegistry.get(name).name for name in dict.fromkeys(chosen)]


def hook_options(hook: type[TrainingHook]) -> dict[str, inspect.Parameter]:
    """Return the keyword-only options of a hook's constructor by name."""
    parameters = inspect.signature(hook).parameters
    return {name: option for name, option in parameters.items() if option.kind is inspect.Parameter.KEYWORD_ONLY}


def without_duplicates(hooks: Iterable[TrainingHook]) -> list[TrainingHook]:
    """Return the hooks as a list; raises :class:`UsageError` when two share a name."""
    by_name: dict[str, TrainingHook] = {}
    for hook in hooks:
        if hook.name in by_name:
            raise UsageError(
                f"Two hooks are named {hook.name!r}: {_where(type(by_name[hook.name]))} and {_where(type(hook))}; "
                "names must be unique, since metrics and states are keyed by them."
            )
        by_name[hook.name] = hook
    return list(by_name.values())
