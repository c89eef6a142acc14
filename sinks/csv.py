"""The record of a run as a table: one row per emit, its columns known before the first."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

from loopscope.hooks import STEP_POINTS, HookPoint, MetricInfo, RunInfo, Series, SinkRegistry
from loopscope.runs import RecordSink

from .csv_cells import cell, element, elements, escape, parse_cell, parse_element, parse_pairs, split, unescape
from .record import LAYOUTS, Record, in_runs, in_step, number_texts, plain
from .run_file import RunFile, complete_lines

POSITION = ("epoch", "step", "hook_point")
OTHER = "other"
PER_PARAMETER = "/<parameter>"


@dataclass(frozen=True)
class Layout:
    """How the texts of one set of metrics lie in a row, behind its position."""

    order: Sequence[int]
    """For each text of the row, which metric it belongs to."""
    between: Sequence[str]
    """What stands before, between and after the texts."""
    keyed: Sequence[bool]
    """For each metric, whether it stands behind a key."""

    def row(self, position: str, texts: Sequence[str]) -> str:
        """Return a row with the text of each metric."""
        pieces = [*self.between]
        pieces[1::2] = map(texts.__getitem__, self.order)
        return f"{position}{''.join(pieces)}\n"


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
        self.layout = lru_cache(LAYOUTS)(self._layout)
        self.header = ",".join(map(escape, self.names)) + "\n"

    def _layout(self, metrics: tuple[str, ...], *, brackets: bool) -> Layout:
        """Lay out a row of these metrics; ``brackets`` says whether to put those behind a key into brackets."""
        places = [self._place(metric) for metric in metrics]
        order = sorted(range(len(metrics)), key=lambda metric: places[metric][0])
        between, column, closing = [], len(POSITION) - 1, ""
        for metric in order:
            place, key = places[metric]
            separator = "," * (place - column) or ";"
            between += [closing + separator + (f"{key}:" + "[" * brackets if key else ""), ""]
            column, closing = place, "]" if key and brackets else ""
        between.append(closing + "," * (len(self.names) - 1 - column))
        return Layout(order, between, [bool(key) for _, key in places])

    def _place(self, metric: str) -> tuple[int, str]:
        """Return the column of a metric and its key in there, encoded; empty where the column is its own."""
        if metric in self._alone:
            return self._alone[metric], ""
        family = metric
        while "/" in family:
            family = family.rpartition("/")[0]
            if family in self._families and metric != family + "/":
                return self._families[family], escape(metric[len(family) + 1 :])
        return len(self.names) - 1, escape(metric)


@SinkRegistry.register
class CSVSink(RecordSink):
    """Write the metrics to STRATEGY.csv, one column per metric that the hooks describe.

    The header is ``epoch,step,hook_point``, the described metrics and ``other``; nothing is ever rewritten. Values
    are written as ``sinks/csv_cells.py`` says. The metrics of one per-parameter family share a column, as
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
        self._file.write(self._columns.header)

    def position(self) -> dict[str, Any]:
        """Return the size of the file."""
        return {"size": self._file.size}

    def files(self) -> Sequence[Path]:
        """Name the strategy's file."""
        return self._file.paths

    def resume(self, run: RunInfo, position: Mapping[str, Any]) -> None:
        """Go on in the strategy's file, cut back to the position; its columns must be those of the run."""
        self._columns = Columns(run.metric_infos)
        self._file.resume(run, position["size"], header=self._columns.header.encode())

    def emit(self, metrics: Mapping[str, Any], epoch: int, hook_point: HookPoint, *, step: int) -> None:
        """Append one row, or at step-level points one for each set of steps."""
        if hook_point in STEP_POINTS:
            series = in_step(metrics.values())
            groups = _by_steps(metrics, step) if series is None else [(tuple(metrics), *series)]
            self._file.write("".join([self._series_row(epoch, hook_point, *group) for group in groups]))
            return
        layout = self._columns.layout(tuple(metrics), brackets=False)
        texts = number_texts(metrics.values())
        if texts is None:
            together = zip(metrics.values(), layout.keyed, strict=True)
            texts = [element(value) if keyed else _alone(value) for value, keyed in together]
        self._file.write(layout.row(f"{epoch},{step},{hook_point.name}", texts))

    def _series_row(
        self, epoch: int, point: HookPoint, names: tuple[str, ...], steps: Sequence[int], values: Sequence[list[Any]]
    ) -> str:
        """Make the row of series that share their steps."""
        texts = elements(list(chain.from_iterable(values)))
        if len(steps) != 1:
            texts = in_runs(texts, len(values), len(steps), ";")
        layout = self._columns.layout(names, brackets=len(steps) > 1)
        return layout.row(f"{epoch},{';'.join(map(str, steps))},{point.name}", texts)

    def flush(self) -> None:
        """Force everything emitted so far onto the disk."""
        self._file.flush()

    def close(self, status: str) -> None:
        """Close the strategy's file."""
        self._file.close()

    @classmethod
    def read(cls, path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
        """Yield step and metrics of each row; a family of per-parameter metrics is a dict."""
        return ((record.step, record.metrics) for record in read_csv(path))


def _alone(value: Any) -> str:
    """Return a value's text in a cell of its own."""
    return cell(plain(value) if isinstance(value, Series) else value)


Group = tuple[tuple[str, ...], Sequence[int], Sequence[list[Any]]]


def _by_steps(metrics: Mapping[str, Any], step: int) -> Iterator[Group]:
    """Yield names, steps and values of the series of each set of steps; what is none is one of the one ``step``."""
    groups: dict[tuple[int, ...], dict[str, list[Any]]] = {}
    for name, value in metrics.items():
        series = value if isinstance(value, Series) else Series([step], [value])
        groups.setdefault(tuple(series.steps), {})[name] = series.values
    for steps, values in groups.items():
        yield tuple(values), steps, list(values.values())


def read_csv(path: Path) -> Iterator[Record]:
    """Yield the rows that a :class:`CSVSink` wrote, as emits; a last line cut off by a crash is left out.

    What comes back differs from what was emitted in this: a per-parameter family is one dict under its column's
    name; an emit whose series differ in their steps is one record for each set of steps, and a record of series has
    the last of them as its ``step``; a value at a step-level point is a series of one; keys of nested dicts are
    text, tuples lists, and an object that is no number, text, list or dict is its text.
    """
    lines = complete_lines(path)
    columns = [unescape(name) for name in next(lines, "").split(",")]
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
