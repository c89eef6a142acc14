"""CSV sink: one row per emit, with columns fixed before the first row."""

import csv
import io
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from loopscope.errors import UsageError
from loopscope.hooks import STEP_POINTS, HookPoint, Series, SinkRegistry
from loopscope.option_words import option_text
from loopscope.runs import Record

from .record import LAYOUTS, NUMBERS, POSITION, json_text
from .run_file import FileSink, complete_lines

if TYPE_CHECKING:
    from loopscope.hooks import MetricInfo, RunInfo

OTHER = "other"
PER_PARAMETER = "/<parameter>"
# Numbers that Python and JSON write differently.
WORDS: dict[str, Any] = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf, "True": True, "False": False}


class Columns:
    """The column of each metric: a separate one, that of its per-parameter family, or ``other``."""

    def __init__(self, infos: Mapping[str, "MetricInfo"]) -> None:
        """Derive the columns from the described metrics, by full name, in order."""
        single = {name for name in infos if not name.endswith(PER_PARAMETER)}
        column = {name: name if (family := name.removesuffix(PER_PARAMETER)) in single else family for name in infos}
        self.names = [*POSITION, *dict.fromkeys(column.values()), OTHER]
        index = {name: position for position, name in enumerate(self.names)}
        self._single = {name: index[name] for name in single}
        self._families = {name.removesuffix(PER_PARAMETER): index[column[name]] for name in infos if name not in single}
        self._cached_places = lru_cache(LAYOUTS)(self._places)
        header = io.StringIO()
        csv.writer(header, lineterminator="\n").writerow(self.names)
        self.header = header.getvalue()

    def row(self, position: Sequence[Any], metrics: Mapping[str, Any]) -> str:
        """Return the row of these metrics; metrics that share a column become a dict by key."""
        cells: dict[int, Any] = {}
        for (column, key), value in zip(self._cached_places(tuple(metrics)), metrics.values(), strict=True):
            if key:
                cells.setdefault(column, {})[key] = value
            else:
                cells[column] = value
        row = [*map(str, position), *[""] * (len(self.names) - len(POSITION))]
        for column, value in cells.items():
            row[column] = _cell(value)
        return ",".join(row) + "\n"

    def _places(self, metrics: tuple[str, ...]) -> list[tuple[int, str]]:
        return [self._place(metric) for metric in metrics]

    def _place(self, metric: str) -> tuple[int, str]:
        """Return the column of a metric and its key in that column; the key is empty for a separate column."""
        if metric in self._single:
            return self._single[metric], ""
        family = metric
        while "/" in family:
            family = family.rpartition("/")[0]
            if family in self._families and metric != family + "/":
                return self._families[family], metric[len(family) + 1 :]
        return len(self.names) - 1, metric


def _cell(value: Any) -> str:
    """Return the text of a cell, quoted like the csv module does: numbers without quotes, JSON always with quotes."""
    # csv.writer takes twice as long, mostly for the numbers.
    if type(value) in NUMBERS:
        return repr(value)
    return '"' + json_text(value).replace('"', '""') + '"'


@SinkRegistry.register
class CSVSink(FileSink):
    """Write the metrics to STRATEGY.csv, one column per metric that the hooks describe.

    The header is ``epoch,step,hook_point``, the described metrics and ``other``; rows are only appended. Numbers are
    written in Python's notation (``0.5``, ``nan``, ``-inf``, ``3``, ``True``), all other values as JSON. The metrics of
    a per-parameter family share a column, as ``{"parameter": value}``; an undescribed metric goes to ``other`` as
    ``{"name": value}``.

    At step-level points a row has the series of one emit that share their steps: ``step`` lists the steps as ``[4,5]``,
    and each cell lists one value per step; a single number is written without brackets. Series with other steps go to
    another row. :func:`read_csv` reads the file.
    """

    name: ClassVar[str] = "csv"
    flag: ClassVar[str | None] = "--hook-csv"
    notation: ClassVar[Mapping[str, str]] = {"cells": "json"}

    def __init__(self) -> None:
        super().__init__()
        self._columns = Columns({})

    def header(self, run: "RunInfo", position: Mapping[str, Any]) -> str:
        """Return the names of the columns; raises :class:`UsageError` for a file in an older notation."""
        if position and position.get("cells") != self.notation["cells"]:
            raise UsageError(
                f"{run.strategy}.csv was written by an older version, which did not write lists and dicts as JSON; "
                f"resume the run with that version, or restart it with {option_text('overwrite', True)}."
            )
        self._columns = Columns(run.metric_infos)
        return self._columns.header

    def emit(self, metrics: Mapping[str, Any], epoch: int, hook_point: HookPoint, *, step: int) -> None:
        """Append one row, or at step-level points one row for each set of steps."""
        if hook_point in STEP_POINTS:
            groups: dict[tuple[int, ...], dict[str, Any]] = {}
            for name, value in metrics.items():
                series = value if isinstance(value, Series) else Series([step], [value])
                groups.setdefault(tuple(series.steps), {})[name] = _shown(series.values)
            parts = groups.items()
            rows = [self._columns.row((epoch, _cell(_shown(at)), hook_point.name), part) for at, part in parts]
        else:
            rows = [self._columns.row((epoch, step, hook_point.name), metrics)]
        self._write("".join(rows))

    @classmethod
    def read(cls, path: Path) -> Iterator[Record]:
        """Yield the rows of a :class:`CSVSink` as records of emits; a truncated last line is skipped.

        The records differ from the emits as follows. A per-parameter family is one dict under the name of its column.
        An emit whose series have different steps gives one record for each set of steps, with the last step as
        ``step``. A value at a step-level point is a series of length one. Keys of nested dicts are text, tuples are
        lists, and other objects are their text.
        """
        rows = _rows(path)
        columns = next(rows, [])
        for row in rows:
            cells = dict(zip(columns, row, strict=True))
            epoch, step, point = (cells.pop(field) for field in POSITION)
            values = {name: _value(cell) for name, cell in cells.items() if cell}
            metrics = values.pop(OTHER, {}) | values
            at = _value(step)
            steps = at if isinstance(at, list) else [at]
            if HookPoint[point] in STEP_POINTS:
                metrics = {name: _series(value, steps) for name, value in metrics.items()}
            yield Record(int(epoch), steps[-1], HookPoint[point], metrics)


read_csv = CSVSink.read


def _shown(values: Sequence[Any]) -> Any:
    """Return the content of a series' cell: its values, or a single number without a list."""
    return values[0] if len(values) == 1 and type(values[0]) in NUMBERS else values


def _rows(path: Path) -> Iterator[list[str]]:
    """Yield the texts of the cells of each complete line, without a limit on their length."""
    reader = csv.reader(complete_lines(path))
    while True:
        # csv has a process-wide limit on the length of fields, so it is restored after each row.
        limit = csv.field_size_limit(sys.maxsize)
        try:
            row = next(reader, None)
        except csv.Error as error:
            raise ValueError(str(error)) from error
        finally:
            csv.field_size_limit(limit)
        if row is None:
            return
        yield row


def _value(cell: str) -> Any:
    if cell in WORDS:
        return WORDS[cell]
    try:
        return json.loads(cell)
    except ValueError as error:
        sentence = f"{cell[:40]!r} is neither a number nor JSON; older versions wrote lists and dicts in this way"
        raise ValueError(sentence) from error


def _series(value: Any, steps: list[int]) -> Series | dict[str, Any]:
    """Convert the cell of a series, or of a family of series."""
    if isinstance(value, dict):
        return {key: _series(item, steps) for key, item in value.items()}
    return Series(steps, value if isinstance(value, list) else [value])
