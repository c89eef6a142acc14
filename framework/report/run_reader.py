"""Reader of run folders for the page: checks sizes first, and reads damaged files up to the damage."""

import json
import operator
import re
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from ..doctor import Curve, Diagnosis, diagnose, series_in
from ..durable_files import is_readable_file, path_exists, read_json, read_lines
from ..errors import LONGEST_TEXT, UsageError, listed, require, shortened
from ..hooks import ALERTS, alert_fields, as_float
from ..runs import EXPLANATION, REWINDS, SUMMARY, Record, RunRecord, forward_emits, history_without_metrics, record_of
from .curves import NUMBERS, check_size
from .explanations import read_explained
from .run_index import FoundRun, inspect_run

MOST_ALERT_BYTES, MOST_ALERTS = 2**24, 1000
MOST_DIAGNOSED = 4096  # metrics, like in a history
FEW_ROWS = 3  # shown rows of an alert
REWIND = re.compile(r"(?:steps_(?=\d+_to_)|explained_step_(?=\d+$))(?P<step>\d{1,18})(?:_to_(?P<until>\d{1,18}))?")
MOST_ROWS = MOST_COLUMNS = 200  # of a heat map


@dataclass
class ThinnedRows:
    """A list metric over steps; whenever there are too many rows, every second one is dropped."""

    steps: list[int] = field(default_factory=list)
    rows: list[list[float]] = field(default_factory=list)
    seen: int = 0
    longest: int = 0
    stride: int = 1

    def add(self, step: int, row: Sequence[float]) -> None:
        """Add the next row."""
        if self.seen % self.stride == 0:
            self.steps.append(step)
            self.rows.append([as_float(value) for value in row[:MOST_COLUMNS]])
        self.seen, self.longest = self.seen + 1, max(self.longest, len(row))
        if len(self.rows) > MOST_ROWS:
            self.steps, self.rows, self.stride = self.steps[::2], self.rows[::2], self.stride * 2


@dataclass
class ShownRun:
    """A run with its content for the page, and sentences about missing content."""

    label: str
    run: FoundRun
    name: str = ""  # the full name, where the label lacks the parts that all runs share
    points: dict[str, tuple["array[float]", "array[float]"]] = field(default_factory=dict)  # steps and values
    lists: dict[str, ThinnedRows] = field(default_factory=dict)
    last: tuple[int, int] | None = None  # epoch and step of the last emit
    alerts: list[Mapping[str, Any]] = field(default_factory=list)
    alert_records: list[Mapping[str, Any]] = field(default_factory=list)  # complete lines of the file
    diagnosis: Diagnosis | None = None  # none of a run without readable settings, and of a rewind
    costs: Mapping[str, Any] = field(default_factory=dict)  # by hook
    problems: list[str] = field(default_factory=list)
    rewinds: list["ShownRun | str"] = field(default_factory=list)  # ordered by first step; explanations are HTML
    added: Sequence[str] = ()  # of a rewind: added hooks, or hooks with other options; only their metrics are kept

    @property
    def treatments(self) -> str:
        """The treatments as text; empty without treatments."""
        return self.run.record.treatments_text if self.run.record and self.run.record.treatments else ""

    def take(self, emit: Record) -> None:
        """Add the metrics of an emit."""
        for name, steps, values in series_in(emit.step, emit.metrics):
            if type(values[0]) in NUMBERS:
                recorded_steps, recorded_values = self.points.setdefault(name, (array("d"), array("d")))
                recorded_steps.extend([float(operator.index(step)) for step in steps])
                recorded_values.extend(map(as_float, values))
            elif isinstance(values[0], list) and values[0] and NUMBERS.issuperset(map(type, values[0])):
                self.lists.setdefault(name, ThinnedRows()).add(operator.index(steps[0]), values[0])
        self.last = emit.epoch, emit.step

    def omit_hooks_of(self, run: RunRecord | None) -> None:
        """Keep only the metrics of hooks that the ``run`` did not have with the same options."""
        original, repeated = (record.hooks if record else {} for record in (run, self.run.record))
        self.added = [name for name, options in repeated.items() if original.get(name) != options]
        self.points = {name: pair for name, pair in self.points.items() if name.partition("/")[0] in self.added}
        self.lists = {name: rows for name, rows in self.lists.items() if name.partition("/")[0] in self.added}
        self.alerts = [alert for alert in self.alerts if alert["hook"] in self.added]


def read_shown(folder: Path, label: str, most: int) -> ShownRun:
    """Read a possibly damaged run and its rewinds; a record larger than ``most`` bytes is not read."""
    shown = _read(folder, label, most)
    with _noted(shown.problems):
        _read_rewinds(shown, folder / REWINDS, most)
    if shown.run.record is not None:
        with _noted(shown.problems):
            shown.diagnosis = _diagnosed(shown, folder, shown.run.record)
    return shown


def _diagnosed(shown: ShownRun, folder: Path, record: RunRecord) -> Diagnosis:
    """Return the findings about a run from what was read of it, without reading its record again."""
    history = history_without_metrics(folder, record)
    for name, (steps, values) in islice(shown.points.items(), MOST_DIAGNOSED):
        history.curves[name] = Curve.of_points(steps, values)
    history.step = shown.last[1] if shown.last else 0
    for alert in shown.alert_records:
        history.add_alert(alert)
    return diagnose(history)


def _read_rewinds(shown: ShownRun, folder: Path, most: int) -> None:
    names = sorted(path.name for path in folder.iterdir()) if path_exists(folder) else []
    rewinds = sorted(filter(None, map(REWIND.fullmatch, names)), key=lambda match: int(match["step"]))
    for match in rewinds:
        with _noted(shown.problems):
            if match["until"] is None:
                shown.rewinds.append(read_explained(folder / match[0] / EXPLANATION))
                continue
            label = f"{shown.label}, steps {match['step']} to {match['until']} again"
            rewind = _read(folder / match[0], label, most)
            shown.problems += [f"{match[0]}: {problem}" for problem in rewind.problems]
            rewind.omit_hooks_of(shown.run.record)
            shown.rewinds.append(rewind)


def _read(folder: Path, label: str, most: int) -> ShownRun:
    shown = ShownRun(label, inspect_run(folder))
    problems = shown.problems = [shown.run.problem] if shown.run.problem else []
    if shown.run.record is not None:
        with _noted(problems):
            sink, path = record_of(folder, shown.run.record.strategy)
            check_size(path, most)
            forward_emits(path, sink.read(path), shown.take)
    with _noted(problems):
        _read_alerts(shown, folder / ALERTS)
    if shown.run.summary and isinstance(costs := read_json(folder / SUMMARY).get("hook_profile"), dict):
        shown.costs = {name: cost for name, cost in costs.items() if isinstance(cost, dict)}
    return shown


@contextmanager
def _noted(problems: list[str]) -> Iterator[None]:
    try:
        yield
    except (OSError, UsageError) as error:
        problems.append(str(error))


def _read_alerts(shown: ShownRun, path: Path) -> None:
    if is_readable_file(path):
        check_size(path, MOST_ALERT_BYTES)
    lines = [line for _, line in read_lines(path)]
    for line in lines[:MOST_ALERTS]:
        with suppress(ValueError, LookupError, TypeError, AttributeError, RecursionError, UsageError):
            alert = alert_fields(json.loads(line))
            names = ("hook", "metric", "severity", "id", "sentence")
            texts = {name: shortened(str(alert[name]), LONGEST_TEXT) for name in names}
            if alert["rows"]:
                texts["rows"] = f"rows {listed(alert['rows'], FEW_ROWS)}"
            is_over = alert.get("is_over") is True
            shown.alerts.append({"step": operator.index(alert["step"]), "is_over": is_over, **texts})
            shown.alert_records.append(alert)
    missing = len(lines) - len(shown.alerts)
    reason = f"they are not alerts, or there are more than {MOST_ALERTS:,}"
    require(not missing, f"{missing:,} lines of {path} are not shown: {reason}.")
