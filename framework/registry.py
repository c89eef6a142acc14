"""The registries of hooks and experiments, and the expansion of what a user selects."""

import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, TypeVar

from framework.errors import UsageError, unknown
from framework.hook_checks import KEYWORDS, check_hook_class, has_commits, hook_kind, hook_options, qualified
from framework.hooks import TrainingHook
from framework.metrics import MetricSink

__all__ = [
    "GROUPS",
    "ExperimentRegistry",
    "HookRegistry",
    "Registry",
    "SinkRegistry",
    "bulk_hooks",
    "hook_kind",
    "hook_options",
    "select_hooks",
    "without_duplicates",
]
Entry = TypeVar("Entry", bound=type[Any])
GROUPS = ("none", "minimal", "observers", "interventions", "full")


class NameTakenError(UsageError):
    """Two classes claim one name, so nobody can tell which one is meant."""


class Registry(Generic[Entry]):
    """Classes by their unique ``name``."""

    def __init__(self, kind: str, entry_point_group: str, check: Callable[[Entry], None]) -> None:
        self._kind = kind
        self._group = entry_point_group
        self._check = check
        self._entries: dict[str, Entry] = {}
        self._broken: dict[str, str] = {}
        self._discovered = False

    def register(self, entry: Entry) -> Entry:
        """Add a class (a decorator); raises :class:`UsageError` for a malformed class or a taken name."""
        self._check(entry)
        present = self._entries.get(entry.name)
        if present is not None and present is not entry:
            raise NameTakenError(
                f"Two {self._kind}s are named {entry.name!r}: {qualified(present)} and {qualified(entry)}; "
                "rename one of them."
            )
        self._entries[entry.name] = entry
        return entry

    def unregister(self, name: str) -> None:
        """Forget a class again."""
        self._entries.pop(name, None)

    def discover(self) -> None:
        """Register what installed packages offer under the entry-point group; nothing is switched on by that.

        What cannot be loaded is left out with a warning, and refused by :meth:`get`: one broken package must not
        stop the runs that do without it.
        """
        if not self._discovered:
            self._discovered = True
            for point in entry_points(group=self._group):
                self._load(point)

    def _load(self, point: EntryPoint) -> None:
        try:
            self.register(point.load())
        except NameTakenError:
            self._discovered = False
            raise
        except Exception as error:
            reason = str(error) if isinstance(error, UsageError) else f"{type(error).__name__}: {error}."
            self._broken[point.name] = f"The {self._kind} {point.name!r} of {point.value} cannot be used. {reason}"
            warnings.warn(self._broken[point.name], stacklevel=4)

    def get(self, name: str, *, keywords: Sequence[str] = ()) -> Entry:
        """Return the class called ``name``; raises :class:`UsageError` with the nearest name or keyword."""
        self.discover()
        if name in self._entries:
            return self._entries[name]
        if name in self._broken:
            raise UsageError(self._broken[name])
        raise unknown(self._kind, name, [*self._entries, *keywords])

    def __iter__(self) -> Iterator[Entry]:
        """Iterate over the classes, by name."""
        self.discover()
        return iter([self._entries[name] for name in sorted(self._entries)])

    def names(self) -> list[str]:
        """List the names, sorted."""
        return [entry.name for entry in self]


def check_sink_class(sink: type[MetricSink]) -> None:
    """Refuse a sink class that could not work; raises :class:`UsageError` that says what to change."""
    if sink.name == MetricSink.name or not sink.name.replace("_", "").isalnum():
        raise UsageError(f"Sink class {qualified(sink)} needs a name of its own, of letters, digits and underscores.")
    if sink.flag is not None and not sink.flag.startswith("--"):
        raise UsageError(f"Sink class {qualified(sink)} has the flag {sink.flag!r}; it must begin with two dashes.")
    if sink.option is not None and sink.option not in inspect.signature(sink).parameters:
        raise UsageError(f"Sink class {qualified(sink)} has the option {sink.option!r}, which its constructor lacks.")


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

    Keywords among the names: ``all``, ``observers``, and ``with_debug``, which adds the debug interventions that
    commit nothing.
    ``training_metrics`` leads whenever any hook is on.
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
            chosen += [hook.name for hook in HookRegistry if hook.debug and not has_commits(hook)]
        elif name in hook_sets and name not in HookRegistry.names():
            raise UsageError(f"{name!r} is no hook, but a group of hooks: --with-hooks {name}.")
        else:
            chosen.append(name)
    if chosen:
        chosen.insert(0, "training_metrics")
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
