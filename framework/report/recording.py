"""What a page shows of a run's folder: sizes are looked at first, and what is damaged is read as far as it goes."""

import json
import operator
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from ..durable_files import is_there
from ..errors import UsageError, require
from ..hooks import ALERTS, HookPoint
from ..runs import CONFIG, SUMMARY, Record, pass_on
from .curves import NUMBERS, Curve, record_of, series_in
from .found import FoundRun, look_at

LARGEST_TEXT, LONGEST_LINE = 16 * 2**20, 64 * 2**20
"""Bytes of a JSON file, and of a line of a record: what is read at once."""
MOST_METRICS = 20_000
MOST_ALERTS = 1000
MOST_ROWS, MOST_COLUMNS = 200, 200  # of a heat map


@dataclass
class Rows:
    """A list of numbers over steps: of too many rows every second is dropped, again and again."""

    steps: list[int] = field(default_factory=list)
    rows: list[list[float]] = field(default_factory=list)
    seen: int = 0
    longest: int = 0
    stride: int = 1

    def add(self, step: int, row: Sequence[float]) -> None:
        """Take the next row."""
        if self.seen % self.stride == 0:
            self.steps.append(step)
            self.rows.append([float(value) for value in row[:MOST_COLUMNS]])
        self.seen, self.longest = self.seen + 1, max(self.longest, len(row))
        if len(self.rows) > MOST_ROWS:
            self.steps, self.rows, self.stride = self.steps[::2], self.rows[::2], self.stride * 2


@dataclass
class Recording:
    """The numbers of a record, by full name of their metric, and in sentences what is missing."""

    points: dict[str, tuple["array[float]", "array[float]"]] = field(default_factory=dict)
    lists: dict[str, Rows] = field(default_factory=dict)
    last: tuple[int, int] | None = None  # epoch and step
    steps_of_epochs: set[float] = field(default_factory=set)
    left_out: int = 0  # values of metrics beyond the most that are read
    problems: list[str] = field(default_factory=list)

    def curves(self) -> dict[str, Curve]:
        """Return the numbers as curves; of several values at one step the last."""
        return {name: Curve.of_points(steps, values) for name, (steps, values) in self.points.items()}

    def take(self, emit: Record) -> None:
        """Add the metrics of an emit."""
        if emit.hook_point is HookPoint.POST_EPOCH:
            self.steps_of_epochs.add(emit.step / (emit.epoch + 1))
        for name, steps, values in series_in(emit.step, emit.metrics):
            is_new = name not in self.points and name not in self.lists
            if is_new and len(self.points) + len(self.lists) >= MOST_METRICS:
                self.left_out += len(steps)
            elif type(values[0]) in NUMBERS:
                known = self.points.setdefault(name, (array("d"), array("d")))
                known[0].extend([float(operator.index(step)) for step in steps])
                known[1].extend(map(float, values))
            elif isinstance(values[0], list) and values[0] and NUMBERS.issuperset(map(type, values[0])):
                self.lists.setdefault(name, Rows()).add(operator.index(steps[0]), values[0])
        self.last = emit.epoch, emit.step


def size_problem(path: Path, most: int) -> str:
    """Return a sentence where a file that is there is no file, or has more than ``most`` bytes."""
    if not is_there(path):
        return ""
    if not path.is_file():
        return f"{path} cannot be read: it is no file."
    size = path.stat().st_size
    return f"{path} was not read: it has {size:,} bytes, and at most {most:,} are read." if size > most else ""


def look_carefully(folder: Path) -> FoundRun:
    """Look at a run that may be a stranger's: what is too large is a damage, as is what cannot be read."""
    try:
        for name in (CONFIG, SUMMARY):
            problem = size_problem(folder / name, LARGEST_TEXT)
            require(not problem, problem)
    except (OSError, UsageError) as error:
        return FoundRun(folder, "damaged", problem=str(error))
    return look_at(folder)


def read_recording(run: FoundRun, most: int) -> Recording:
    """Read the record of a run, up to what is broken; one of more than ``most`` bytes is not read."""
    found = Recording()
    if run.record is None:
        return found
    try:
        sink, path = record_of(run.path, run.record.strategy)
        problem = size_problem(path, most)
        require(not problem, problem)
        with path.open("rb") as file:
            longest = max(map(len, iter(partial(file.readline, LONGEST_LINE + 1), b"")), default=0)
        require(longest <= LONGEST_LINE, f"{path} was not read: it has a line of more than {LONGEST_LINE:,} bytes.")
        pass_on(path, sink.read(path), found.take)
    except OSError as error:
        found.problems.append(f"The record in {run.path} cannot be read: {error.strerror}.")
    except UsageError as error:
        found.problems.append(str(error))
    if found.left_out:
        found.problems.append(f"{found.left_out:,} values were left out, of metrics after the first {MOST_METRICS:,}.")
    return found


def read_alerts(folder: Path) -> tuple[list[Mapping[str, Any]], str]:
    """Return the first alerts of a run, and a sentence on what is missing of them."""
    path = folder / ALERTS
    try:
        problem = size_problem(path, LARGEST_TEXT)
        if problem or not is_there(path):
            return [], problem
        lines = path.read_bytes().splitlines()
    except (OSError, UsageError) as error:
        return [], f"{path} cannot be read: {error}"
    found = [alert for alert in map(_alert, lines[:MOST_ALERTS]) if alert]
    broken = len(lines[:MOST_ALERTS]) - len(found)
    more = (
        f"{path} has {len(lines):,} alerts; the first {MOST_ALERTS:,} are shown. " if len(lines) > MOST_ALERTS else ""
    )
    return found, more + (f"{path} has {broken:,} lines that are no alerts." if broken else "")


def _alert(line: bytes) -> Mapping[str, Any] | None:
    """Return what an alert says, in the types that it must have; nothing for a line that is none."""
    try:
        content = json.loads(line)
        texts = {name: str(content[name]) for name in ("hook", "metric", "sentence")}
        return {"step": operator.index(content["step"]), "epoch": operator.index(content["epoch"]), **texts}
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
