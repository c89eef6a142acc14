"""The kinds of hooks, their groups, and the selection of hooks by groups, keywords and names."""

from collections.abc import Mapping, Sequence

from ...errors import UsageError, unknown
from ...option_words import option_text
from ..base import InterventionHook, TrainingHook
from ..class_checks import HookRegistry

KEYWORDS = ("all", "observers", "with_debug")
"""Keywords of ``--hooks``, in addition to names of hooks."""
BULK = ("observers", "interventions", "full", "all")
"""The groups and keywords that select hooks by their kind."""
GROUPS = ("none", "minimal", "health", "observers", "interventions", "full")


def hook_kind(hook: type[TrainingHook]) -> str:
    """Return the kind of a hook: observer, intervention, committing or debug."""
    if hook.debug:
        return "debug"
    if not issubclass(hook, InterventionHook):
        return "observer"
    return "committing" if hook.commits else "intervention"


def bulk_hooks(keyword: str) -> list[str]:
    """Return the hooks of ``all`` (or ``full``), ``observers`` or ``interventions``, no debug or committing hooks."""
    kinds = {"observers": {"observer"}, "interventions": {"intervention"}}.get(keyword, {"observer", "intervention"})
    return [hook.name for hook in HookRegistry if hook_kind(hook) in kinds]


def hook_groups(minimal: Sequence[str] = ()) -> dict[str, list[str]]:
    """Return the groups of ``--with-hooks``, which contain no committing and no debug hooks."""
    health = [*always_on(), *(hook.name for hook in HookRegistry if hook.in_health)]
    bulk = {group: bulk_hooks(group) for group in GROUPS if group in BULK}
    return {"none": [], "minimal": [*always_on(), *minimal], "health": health, **bulk}


def always_on() -> list[str]:
    """Return the names of the hooks that are active whenever another hook or a sink that keeps metrics is active."""
    return [hook.name for hook in HookRegistry if hook.always]


def select_hooks(
    group: str | None, named: Sequence[str], hook_sets: Mapping[str, Sequence[str]], owner: str
) -> list[str]:
    """Return the names of the hooks in ``--with-hooks GROUP`` and ``--hooks NAME...``, in order, without duplicates.

    ``owner`` is the experiment, or empty for an attached run, whose groups are those of :func:`hook_groups`.
    Keywords among the names: ``all``, ``observers``, and ``with_debug``, which adds the debug interventions without
    commits. If any hook is selected, hooks that are ``always`` active come first.
    """
    selected: list[str] = []
    if (bulk := [word for word in (group, *named) if word in BULK]) and not bulk_hooks("all"):
        raise UsageError(
            f"No observers and interventions are registered, so {bulk[0]!r} selects none; from Python, import "
            "loopscope.training_hooks first."
        )
    if group is not None:
        if group not in hook_sets:
            raise _unknown_group(group, hook_sets, owner)
        selected += _checked_group(group, hook_sets[group], owner)
    for name in named:
        if name in ("all", "observers"):
            selected += bulk_hooks(name)
        elif name == "with_debug":
            debug_hooks = [hook for hook in HookRegistry if hook.debug]
            selected += [hook.name for hook in debug_hooks if not (issubclass(hook, InterventionHook) and hook.commits)]
        elif name in hook_sets and name not in HookRegistry.names():
            raise UsageError(f"{name!r} is a group of hooks, not a hook; use {option_text('with_hooks', name)}.")
        else:
            selected.append(name)
    if selected:
        selected = [*always_on(), *selected]
    return [HookRegistry.get(name, keywords=KEYWORDS).name for name in dict.fromkeys(selected)]


def _unknown_group(group: str, hook_sets: Mapping[str, Sequence[str]], owner: str) -> UsageError:
    """Return the error for a word that names no group, but perhaps hooks."""
    names = [name for name in group.replace(",", " ").split() if name not in KEYWORDS]
    if names and {*names} <= {*HookRegistry.names()}:
        what = f"{group!r} is a hook" if len(names) == 1 else f"{group!r} names hooks"
        return UsageError(f"{what}, not a group of hooks; use {option_text('hooks', names)}.")
    problem = unknown("group" if owner else "group of hooks", group, hook_sets)
    return UsageError(f"Experiment {owner!r} has no hook group of that name: {problem}") if owner else problem


def _checked_group(group: str, names: Sequence[str], owner: str) -> Sequence[str]:
    """Return the names of a group; raise :class:`UsageError` if it contains a committing or debug hook."""
    for name in names:
        kind = hook_kind(HookRegistry.get(name))
        if kind in ("committing", "debug"):
            raise UsageError(
                f"Group {group!r} of experiment {owner!r} contains the {kind} hook {name!r}; enable such "
                f"hooks by name: {option_text('hooks', [name])}."
            )
    return names
