"""The record of a run as a table: one row per emit, its columns known before the first."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from framework.contexts import MetricInfo, RunInfo
from framework.hook_points import STEP_POINTS, HookPoint
from framework.metrics import MetricSink, Series
from framework.registry import SinkRegistry
from sinks.cells import (
    NUMBERS,
    cell,
    element,
    elements,
    escape,
    parse_cell,
    parse_element,
    parse_pairs,
    split,
    unescape,
)
from sinks.record import Record, plain
from sinks.run_file import RunFile, complete_lines

POSITION = ("epoch", "step", "hook_point")
OTHER = "other"
PER_PARAMETER = "/<parameter>"


class Columns:
    """Which column a metric goes to: its own, that of its per-parameter family, or ``other``."""

    def __init__(self, infos: Mapping[str, MetricInfo]) -> None:
        """Derive the columns from the described metrics, by full name, in order."""
        alone = [name for name in infos if not name.endswith(PER_PARAMETER)]
        families = [name.removesuffix(PER_PARAMETER) for name in infos if name.endswith(PER_PARAMETER)]
        names: dict[str, None] = {}
        for name in infos:
            column = name.removesuffix(PER_PARAMETER)
            names[name if column in alone else column] = None
        self.names = [*POSITION, *names, OTHER]
        index = {name: position for position, name in enumerate(self.names)}
        self._alone = {name: index[name] for name in alone}
        self._families = {name: index[name + PER_PARAMETER if name in alone else name] for name in families}
        self._places: dict[str, tuple[int, str]] = {}

    def place(self, metric: str) -> tuple[int, str]:
        """Return the column of a metric and its key in there, encoded; empty where the column is its own."""
        if metric not in self._places:
            self._places[metric] = self._found(metric)
        return self._places[metric]

    def _found(self, metric: str) -> tuple[int, str]:
        if metric in self._alone:
            return self._alone[metric], ""
        family = metric
        while "/" in family:
            family = family.rpartition("/")[0]
            if family in self._families and metric != family + "/":
                return self._families[family], escape(metric[len(family) + 1 :])
        return len(self.names) - 1, escape(metric)


@SinkRegistry.register
class CSVSink(MetricSink):
    """Write the metrics to STRATEGY.csv, one column per metric that the hooks describe.

    The header is ``epoch,step,hook_point``, the described metrics and ``other``; nothing is ever rewritten. Values
    are written as ``sinks/cells.py`` says. The metrics of one per-parameter family share a column, as
    ``parameter:value;parameter:value``; a metric that no hook described goes to ``other`` as ``name:value``.

    At step-level points a row holds the series of one emit that share their steps: ``step`` lists the steps as
    ``a;b;c``, and each cell as many values; series with other steps have a row of their own. In a column of
    ``key:value`` pairs a series of several values stands in brackets. :func:`read_csv` reads the file back.
    """

    name: ClassVar[str] = "csv"
    flag: ClassVar[str | None] = "--hook-csv"

    def __init__(self) -> None:
        self._file = RunFile(".csv")
        self._columns = Columns({})

    def set_run_context(self, run: RunInfo) -> None:
        """Start the strategy's file with its header."""
        self._columns = Columns(run.metric_infos)
        self._file.open(run)
        self._file.write(",".join(map(escape, self._columns.names)) + "\n")

    def emit(self, metrics: Mapping[str, Any], epoch: int, hook_point: HookPoint, *, step: int) -> None:
        """Append one row, or at step-level points one for each set of steps."""
        if hook_point not in STEP_POINTS:
            position = [str(epoch), str(step), hook_point.name]
            self._file.write(self._row(position, ((name, *_texts(value)) for name, value in metrics.items())))
            return
        rows = []
        for steps, values in _by_steps(metrics, step).items():
            position = [str(epoch), ";".join(map(str, steps)), hook_point.name]
            rows.append(self._row(position, ((name, *_series_texts(series)) for name, series in values.items())))
        self._file.write("".join(rows))

    def _row(self, position: list[str], texts: Iterable[tuple[str, str, str]]) -> str:
        """Make a row of (metric, text for a cell of its own, text behind a key)."""
        cells = position + [""] * (len(self._columns.names) - len(position))
        pairs: dict[int, list[str]] = {}
        for metric, alone, keyed in texts:
            column, key = self._columns.place(metric)
            if key:
                pairs.setdefault(column, []).append(f"{key}:{keyed}")
            else:
                cells[column] = alone
        for column, items in pairs.items():
            cells[column] = ";".join(items)
        return ",".join(cells) + "\n"

    def flush(self) -> None:
        """Force everything emitted so far onto the disk."""
        self._file.flush()

    def close(self, status: str) -> None:
        """Close the strategy's file."""
        self._file.close()


def _texts(value: Any) -> tuple[str, str]:
    """Return a value's text in a cell of its own and behind a key."""
    if type(value) in NUMBERS:
        text = repr(value)
        return text, text
    if isinstance(value, Series):
        value = plain(value)
    return cell(value), element(value)


def _series_texts(values: list[Any]) -> tuple[str, str]:
    """Return a series' text in a cell of its own and behind a key; its length is that of the steps."""
    text = ";".join(elements(values))
    return text, f"[{text}]" if len(values) > 1 else text


def _by_steps(metrics: Mapping[str, Any], step: int) -> dict[tuple[int, ...], dict[str, list[Any]]]:
    """Group the values of series by their steps; a value that is none counts as a series of the one ``step``."""
    groups: dict[tuple[int, ...], dict[str, list[Any]]] = {}
    for name, value in metrics.items():
        series = value if isinstance(value, Series) else Series([step], [value])
        groups.setdefault(tuple(series.steps), {})[name] = series.values
    return groups


def read_csv(path: Path) -> Iterator[Record]:
    """Yield the rows that a :class:`CSVSink` wrote, as emits; a last line cut off by a crash is left out.

    What comes back differs from what was emitted in this: a per-parameter family is one dict under its column's
    name; an emit whose series differ in their steps is one record for each set of steps, and a record of series has
    the last of them as its ``step``; a value at a step-level point is a series of one; keys of nested dicts are
    text, tuples lists, and an object that is no number, text, list or dict is its text.
    """
    lines = complete_lines(path)
    columns = [unescape(name) for name in next(lines).split(",")]
    for line in lines:
        cells = dict(zip(columns, line.split(","), strict=True))
        epoch, steps, point = (cells.pop(field) for field in POSITION)
        filled = {name: text for name, text in cells.items() if text}
        other = parse_pairs(split(filled.pop(OTHER, ""), ";")) if OTHER in filled else {}
        if HookPoint[point] in STEP_POINTS:
            at = [int(step) for step in steps.split(";")]
            metrics = {name: _parse_series(text, at) for name, text in filled.items()}
            metrics |= {name: _series_of(text, at, keyed=True) for name, text in other.items()}
            yield Record(int(epoch), at[-1], HookPoint[point], metrics)
        else:
            metrics = {name: parse_cell(text) for name, text in filled.items()}
            metrics |= {name: parse_element(text) for name, text in other.items()}
            yield Record(int(epoch), int(steps), HookPoint[point], metrics)


def _parse_series(text: str, steps: list[int]) -> Series | dict[str, Series]:
    """Read a cell of a series, or of a family of them."""
    items = split(text, ";")
    if len(split(items[0], ":")) > 1:
        return {key: _series_of(value, steps, keyed=True) for key, value in parse_pairs(items).items()}
    return _series_of(text, steps, keyed=False)


def _series_of(text: str, steps: list[int], *, keyed: bool) -> Series:
    inner = text[1:-1] if keyed and len(steps) > 1 else text
    return Series(steps, [parse_element(item) for item in split(inner, ";")])
