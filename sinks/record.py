"""One emit, as the readers of a sink's file give it back, and the plain values that files can hold."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from loopscope.hooks import HookPoint, Series

NUMBERS = frozenset({float, int, bool})
LAYOUTS = 64
"""How many sets of names keep their layout; a hook that names other metrics at every fire must not fill the memory."""


@dataclass(frozen=True)
class Record:
    """What one call of :meth:`MetricSink.emit` was given."""

    epoch: int
    step: int
    hook_point: HookPoint
    metrics: dict[str, Any]


def plain(value: Any) -> Any:
    """Return ``value`` in numbers, text, lists and dicts with text as keys.

    Series become ``{"steps": [...], "values": [...]}``, tuples lists, NumPy scalars Python ones; what has no such
    form becomes its text, since one odd value is no reason to lose the metrics around it.

    >>> plain({1: (np.float32(0.5), {2, }), "s": Series([1], [2.0])})
    {'1': [0.5, '{2}'], 's': {'steps': [1], 'values': [2.0]}}
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, np.bool_):
        return bool(value)
    if isinstance(value, (int, np.integer)):
        return int(value)
    if isinstance(value, (float, np.floating)):
        return float(value)
    if isinstance(value, Series):
        return {"steps": plain(value.steps), "values": plain(value.values)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return str(value)


def number_texts(values: Collection[Any]) -> list[str] | None:
    """Return the shortest exact text of every value, or nothing unless all of them are plain numbers.

    >>> number_texts([0.1, 3, True, float("nan")]), number_texts([0.1, "text"])
    (['0.1', '3', 'True', 'nan'], None)
    """
    return list(map(repr, values)) if NUMBERS.issuperset(map(type, values)) else None


def in_step(metrics: Collection[Any]) -> tuple[list[int], list[list[Any]]] | None:
    """Return the steps that all metrics share and the values of each, where all are series: what most emits are.

    >>> in_step([Series([1, 2], [0.1, 0.2]), Series([1, 2], [5, 6])])
    ([1, 2], [[0.1, 0.2], [5, 6]])
    >>> in_step([Series([1], [0.1]), Series([2], [0.2])]), in_step([Series([1], [0.1]), 5])
    (None, None)
    """
    if set(map(type, metrics)) != {Series}:
        return None
    steps = [series.steps for series in metrics]
    values = [series.values for series in metrics]
    shared = steps.count(steps[0]) == len(steps) and set(map(len, values)) == {len(steps[0])}
    return (steps[0], values) if shared else None


def in_runs(texts: Sequence[str], count: int, length: int, separator: str) -> list[str]:
    """Join ``count * length`` texts in ``count`` runs.

    >>> in_runs(["a", "b", "c", "d"], 2, 2, ";")
    ['a;b', 'c;d']
    """
    return [separator.join(texts[begin * length : (begin + 1) * length]) for begin in range(count)]
