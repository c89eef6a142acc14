"""What passes over the records of runs tell: each metric's last and best value, and where two records part."""

import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from heapq import merge
from itertools import groupby, islice
from operator import index, itemgetter
from pathlib import Path
from typing import Any

from ..errors import UsageError, require
from ..runs import Record, forward_emits
from .curves import NUMBERS, check_size, record_of, series_in

MOST_BYTES = 4 * 2**30  # of a record: more is not read
MOST_METRICS, MOST_WAITING = 10**5, 10**6  # of a record; values of one that still have none beside them in another


@dataclass
class Seen:
    """The values of a metric, of which the last is kept, and the lowest of a loss or the highest of an accuracy."""

    best_is: str
    points: int = 0
    not_finite: int = 0
    last: float | None = None
    best: float | None = None
    best_step: int | None = None

    def take(self, step: int, value: float) -> None:
        """Add a value; one that is not finite is never the best."""
        self.points, self.last = self.points + 1, value
        sign = {"lowest": 1, "highest": -1}.get(self.best_is)
        if not abs(value) < math.inf:
            self.not_finite += 1
        elif sign and (self.best is None or sign * value < sign * self.best):
            self.best, self.best_step = value, step


@dataclass
class Scan:
    """A record of which one pass was made, to its end or to a problem; ``length`` is the last epoch and step."""

    folder: Path
    strategy: str
    emits: int = 0
    length: tuple[int, int] | tuple[None, None] = (None, None)
    names: dict[str, bool] = field(default_factory=dict)  # whether the metrics are numbers
    metrics: dict[str, Seen] = field(default_factory=dict)
    problem: str = ""

    def take(self, emit: Record, wanted: Callable[[str], bool]) -> None:
        """Add an emit; raises what :func:`forward_emits` knows for one that no sink wrote."""
        for name, steps, values in series_in(index(emit.step), emit.metrics):
            at = list(map(index, steps))
            self.names[name] = type(values[0]) in NUMBERS
            if self.names[name] and wanted(name):
                self.add(name, at, values)
        require(len(self.names) <= MOST_METRICS, f"{self.folder} has more than {MOST_METRICS:,} metrics: read in part.")
        self.emits, self.length = self.emits + 1, (index(emit.epoch), emit.step)

    def add(self, name: str, steps: Sequence[int], values: Sequence[float]) -> None:
        """Add values of a metric."""
        which = "lowest" if "loss" in name else "highest" if "acc" in name else ""
        seen = self.metrics.setdefault(name, Seen(which))
        for step, value in zip(steps, values, strict=True):
            seen.take(step, value)

    def points(self, side: int, names: set[str]) -> Iterator[tuple[int, int, str, int, int]]:
        """Yield values again: step of the emit, side, name, step, and a hash of the value's text."""
        sink, path = record_of(self.folder, self.strategy)
        for emit in islice(sink.read(path), self.emits):
            for name, steps, values in series_in(emit.step, emit.metrics):
                pairs = zip(steps, values, strict=True) if name in names else ()
                yield from ((emit.step, side, name, step, hash(repr(value))) for step, value in pairs)


def scan(folder: Path, strategy: str, wanted: Callable[[str], bool]) -> Scan:
    """Read the record of a run once, as far as it can be read."""
    found, is_wanted = Scan(folder, strategy), cache(wanted)
    try:
        sink, path = record_of(folder, strategy)
        check_size(path, MOST_BYTES)
        forward_emits(path, sink.read(path), lambda emit: found.take(emit, is_wanted))
    except (UsageError, OSError) as error:
        found.problem = str(error)
    return found


def parting(*scans: Scan) -> dict[str, Any]:
    """Read two records side by side, and find the first ``step`` at which any of their common metrics differ.

    ``points`` is how many values, of the same metric and step, were compared.
    """
    common = scans[0].names.keys() & scans[1].names.keys()
    waiting: list[dict[str, deque[tuple[int, int]]]] = [defaultdict(deque), defaultdict(deque)]
    parted: dict[str, int] = {}
    points, problem = 0, ""
    try:
        values = merge(*(each.points(side, common) for side, each in enumerate(scans)), key=itemgetter(0))
        for _, emitted in groupby(values, itemgetter(0)):
            for _, side, name, step, text in emitted:
                mine, theirs = waiting[side][name], waiting[1 - side][name]
                while theirs and theirs[0][0] < step:  # the other record alone has a value there
                    theirs.popleft()
                if theirs and theirs[0][0] == step:
                    points += 1
                    if theirs.popleft()[1] != text:
                        parted.setdefault(name, step)
                else:
                    mine.append((step, text))
            if parted:  # whatever belongs to steps before was emitted before
                break
            many = sum(len(queue) for queues in waiting for queue in queues.values())
            require(many <= MOST_WAITING, f"more than {MOST_WAITING:,} values have none beside them, so it is not told")
    except (UsageError, OSError, RecursionError) as error:
        problem = str(error)
    first = min(parted.values(), default=None)
    metrics = [name for name in parted if parted[name] == first]
    return {"common": len(common), "points": points, "step": first, "metrics": metrics, "problem": problem}
