"""Hooks are asked to start, for their table, descriptions and state; what they answer is checked."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ..errors import UnsuitableError, UsageError, shortened
from ..hooks import MetricInfo, RunInfo, TrainingHook
from .remedies import unmet


def load(hook: TrainingHook, state: Any) -> None:
    """Give a hook its state back, unless an entry is of another kind than in the state that it has now."""
    if sentence := _misfit("its state", state, hook.state_dict()):
        raise UsageError(sentence)
    hook.load_state_dict(state)


def _misfit(name: str, stored: Any, fresh: Any) -> str:
    word, kinds = next(((word, kinds) for word, kinds in _ALIKE.items() if isinstance(fresh, kinds)), ("", (object,)))
    if not isinstance(stored, kinds):
        return f"{name} is no {word}"
    if not (isinstance(fresh, Mapping) and isinstance(stored, Mapping)):
        return ""
    return next(filter(None, (_misfit(str(key), stored[key], fresh[key]) for key in fresh if key in stored)), "")


_ALIKE = {"number": (int, float, Tensor), "text": (str,), "list": (list, tuple), "mapping": (Mapping,)}
"""Kinds of entries in the state of a hook."""


def described(hook: TrainingHook) -> list[MetricInfo]:
    """Return the metrics that a hook describes."""
    found = list(hook.describe_metrics())  # a list, since a generator would do its work when nobody watches
    if odd := [info for info in found if not isinstance(info, MetricInfo)]:
        raise TypeError(f"returned {odd[0]!r}; it returns a list of MetricInfo, as metric_table(text) does")
    return found


def table(hook: TrainingHook) -> Mapping[str, Mapping[str, float]]:
    """Return a hook's table for the summary of the run."""
    table = hook.table()
    rows = list(table.values()) if isinstance(table, Mapping) else [None]
    numbers = [number for row in rows if isinstance(row, Mapping) for number in row.values()]
    if not all(isinstance(row, Mapping) for row in rows) or not all(isinstance(each, (int, float)) for each in numbers):
        raise TypeError(f"returned {shortened(repr(table))}; a table is a dict of rows, dicts of numbers")
    return table


def start(hook: TrainingHook, run: RunInfo) -> None:
    """Let a hook start; raises :class:`UnsuitableError` for one whose needs the run cannot serve."""
    if hook.needs_reference_weights and run.reference_weights is None:
        raise UnsuitableError(
            f"Hook {hook.name!r} measures against a reference solution, and there is none: name a run or a file of "
            "final weights with --reference PATH (reference= of attach)."
        )
    if sentence := unmet(hook, run.lacks):
        raise UnsuitableError(sentence)
    hook.start(run)
