"""Scans of records: the last and best value of each metric, and the first difference between two records."""

import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from heapq import merge
from itertools import groupby, islice
from operator import index, itemgetter
from pathlib import Path
from typing import Any

from ..doctor import series_in
from ..errors import UsageError
from ..runs import Record, forward_emits, record_of
from .curves import NUMBERS


@dataclass
class MetricSummary:
    """The last value of a metric, and the lowest of a loss or the highest of an accuracy."""

    best_is: str
    points: int = 0
    not_finite: int = 0
    last: float | None = None
    best: float | None = None
    best_step: int | None = None

    def take(self, step: int, value: float) -> None:
        """Add a value; a non-finite value is never the best."""
        self.points, self.last = self.points + 1, value
        sign = {"lowest": 1, "highest": -1}.get(self.best_is)
        if not abs(value) < math.inf:
            self.not_finite += 1
        elif sign and (self.best is None or sign * value < sign * self.best):
            self.best, self.best_step = value, step


@dataclass
class Scan:
    """The result of one pass over a record, to its end or to a problem; ``length`` is the last epoch and step."""

    folder: Path
    strategy: str
    emits: int = 0
    length: tuple[int, int] | tuple[None, None] = (None, None)
    names: dict[str, bool] = field(default_factory=dict)  # whether the metrics are numbers
    metrics: dict[str, MetricSummary] = field(default_factory=dict)
    problem: str = ""

    def take(self, emit: Record, wanted: Callable[[str], bool]) -> None:
        """Add an emit; raises an exception that :func:`forward_emits` handles if no sink can have written it."""
        for name, steps, values in series_in(index(emit.step), emit.metrics):
            indices = list(map(index, steps))
            self.names[name] = type(values[0]) in NUMBERS
            if self.names[name] and wanted(name):
                self.add(name, indices, values)
        self.emits, self.length = self.emits + 1, (index(emit.epoch), emit.step)

    def add(self, name: str, steps: Sequence[int], values: Sequence[float]) -> None:
        """Add values of a metric."""
        best_is = "lowest" if "loss" in name else "highest" if "acc" in name else ""
        summary = self.metrics.setdefault(name, MetricSummary(best_is))
        for step, value in zip(steps, values, strict=True):
            summary.take(step, value)

    def points(self, side: int, names: set[str]) -> Iterator[tuple[int, int, str, int, int]]:
        """Yield the values: step of the emit, side, name, step, and a hash of the value's text."""
        sink, path = record_of(self.folder, self.strategy)
        for emit in islice(sink.read(path), self.emits):
            for name, steps, values in series_in(emit.step, emit.metrics):
                pairs = zip(steps, values, strict=True) if name in names else ()
                # Texts of NaN are equal, unlike NaN itself; a hash takes less memory than a text.
                yield from ((emit.step, side, name, step, hash(repr(value))) for step, value in pairs)


def scan(folder: Path, strategy: str, wanted: Callable[[str], bool]) -> Scan:
    """Read the record of a run once, up to the first unreadable part."""
    result, is_wanted = Scan(folder, strategy), cache(wanted)
    try:
        sink, path = record_of(folder, strategy)
        forward_emits(path, sink.read(path), partial(result.take, wanted=is_wanted))
    except (UsageError, OSError) as error:
        result.problem = str(error)
    return result


def first_difference(*scans: Scan) -> dict[str, Any]:
    """Read two records in parallel, and find the first ``step`` at which one of their common metrics differs.

    ``points`` is the number of compared values of the same metric and step.
    """
    common = scans[0].names.keys() & scans[1].names.keys()
    waiting: list[dict[str, deque[tuple[int, int]]]] = [defaultdict(deque), defaultdict(deque)]
    first_steps: dict[str, int] = {}  # by metric, the first step with different values
    points, problem = 0, ""
    try:
        values = merge(*(record.points(side, common) for side, record in enumerate(scans)), key=itemgetter(0))
        for _, emitted in groupby(values, itemgetter(0)):
            for _, side, name, step, text in emitted:
                mine, theirs = waiting[side][name], waiting[1 - side][name]
                while theirs and theirs[0][0] < step:  # only the other record has a value at that step
                    theirs.popleft()
                if theirs and theirs[0][0] == step:
                    points += 1
                    if theirs.popleft()[1] != text:
                        first_steps.setdefault(name, step)
                else:
                    mine.append((step, text))
            if first_steps:  # values of earlier steps were emitted earlier
                break
    except (UsageError, OSError, RecursionError) as error:
        problem = str(error)
    first_step = min(first_steps.values(), default=None)
    metrics = [name for name, step in first_steps.items() if step == first_step]
    return {"common": len(common), "points": points, "step": first_step, "metrics": metrics, "problem": problem}
