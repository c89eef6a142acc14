"""The budget of a run: its settings from the options, and the decisions that an earlier run has recorded."""

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from ..engine import BUDGET, THINNING, BudgetSettings, Decisions
from ..errors import UsageError
from ..hooks import Series
from ..hooks.selection import ConfiguredHook
from .config import budget_of
from .records import RunRecord
from .replay import Record, forward_emits, record_of

METRIC = f"{BUDGET.name}/{THINNING}"


def budget_settings(
    value: object, hooks: Iterable[ConfiguredHook], own_schedules: Collection[str]
) -> BudgetSettings | None:
    """Return the budget of a run, ``None`` without one.

    Args:
        value: a share, a folder of a run, or ``None``.
        hooks: all hooks of the run.
        own_schedules: names of hooks that the caller has named, or whose schedules the caller has chosen.
    """
    budget = budget_of(value)
    names = {item.hook.name for item in hooks if not item.hook.has_fixed_schedule} - {*own_schedules}
    if budget is None or not names:
        return None
    if isinstance(budget, Path):
        return BudgetSettings(None, names, read_decisions(budget))
    return BudgetSettings(budget, names)


def read_decisions(folder: Path) -> Decisions:
    """Return the factors by which a run has thinned the schedules of its hooks, by step; empty without a record.

    Raises:
        UsageError: if the folder has no run, or its record is damaged.
    """
    decisions: dict[int, dict[str, int]] = {}
    try:
        sink, path = record_of(folder, RunRecord.read(folder).strategy)
    except UsageError:  # a run without a sink that keeps metrics
        return decisions

    def take(emit: Record) -> None:
        series = emit.metrics.get(METRIC)
        if isinstance(series, Series):
            decisions.update(zip(series.steps, map(_factors, series.values), strict=True))

    forward_emits(path, sink.read(path), take)
    return decisions


def _factors(value: Any) -> dict[str, int]:
    if not isinstance(value, Mapping) or not all(type(factor) is int and factor >= 1 for factor in value.values()):
        raise ValueError(f"{METRIC} is {value!r}, and no table of factors")
    return {str(name): factor for name, factor in value.items()}
