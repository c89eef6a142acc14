"""A run as data frames, for people who analyse it with pandas: an extra that nothing else needs."""

import operator
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..errors import UsageError, listed, require, require_package
from ..hooks import Series
from ..runs import Record, RunRecord, pass_on
from .curves import record_of
from .folders import look_at
from .panels import matcher, near_names

if TYPE_CHECKING:
    import pandas

COLUMNS = ["epoch", "step", "hook_point", "metric", "value"]
Point = tuple[int, int, str, str, Any]  # what stands in these columns


@dataclass(frozen=True)
class RecordedFrames:
    """What the folder of a run holds, read when it is first asked for; a run that goes on is read as far as it is.

    ``state`` is completed, failed, interrupted, running, killed (it left no summary) or damaged; ``summary`` is empty
    before the end.
    """

    path: Path
    state: str
    record: RunRecord = field(repr=False)
    summary: Mapping[str, Any] = field(repr=False)

    @property
    def config(self) -> Mapping[str, Any]:
        """The options of the experiment, by name."""
        return self.record.config

    @cached_property
    def _points(self) -> list[Point]:
        sink, path = record_of(self.path, self.record.strategy)
        points: list[Point] = []
        pass_on(path, sink.read(path), lambda emit: points.extend(_flat(emit)))
        return points

    @cached_property
    def names(self) -> list[str]:
        """The metrics in the order of the record; what stands in a dict is named ``metric/key``."""
        return list(dict.fromkeys(name for *_, name, _ in self._points))

    @property
    def metrics(self) -> "pandas.DataFrame":
        """Every value as a row of ``epoch``, ``step``, ``hook_point``, ``metric`` and ``value``, as they came."""
        import pandas

        return pandas.DataFrame(self._points, columns=COLUMNS)

    def frame(self, *patterns: str, by: Literal["step", "epoch"] = "step") -> "pandas.DataFrame":
        """Return metrics side by side: a column for each, and a row for each step at which any of them has a value.

        Of several values in one row the last counts; a metric without one is missing there. Lists and texts are
        objects.

        Args:
            patterns: full names, or patterns as ``loopscope plot`` takes them; none means every metric.
            by: ``step``, or ``epoch`` for a row for each epoch, counted from 0.

        Raises:
            UsageError: for a pattern that matches no metric, with the nearest names.
        """
        import pandas

        require(by in ("step", "epoch"), f"by is {by!r}; it must be step or epoch.")
        chosen = list(dict.fromkeys(name for pattern in patterns for name in self._matching(pattern)))
        values: dict[str, dict[int, Any]] = {name: {} for name in (chosen if patterns else self.names)}
        for epoch, step, _, name, value in self._points:
            if name in values:
                values[name][epoch if by == "epoch" else step] = value
        columns = {name: pandas.Series(found) for name, found in values.items()}
        return pandas.DataFrame(columns).sort_index().rename_axis(index=by)

    def _matching(self, pattern: str) -> list[str]:
        found = list(filter(matcher([pattern]), self.names))
        if not found:
            raise no_metric(self.path, pattern, self.names)
        return found


def read_run(path: str | os.PathLike[str]) -> RecordedFrames:
    """Read the folder of a run, ``OUTPUT_DIR/EXPERIMENT/STRATEGY``, for pandas.

    Raises :class:`UsageError` for a folder without a run that can be read, and where pandas is not installed.
    """
    require_package("pandas", "loopscope.read_run", "frames")
    folder = Path(path)
    found = look_at(folder)
    return RecordedFrames(folder, found.state, found.record or RunRecord.read(folder), found.summary)


def no_metric(folder: Path, pattern: str, names: Sequence[str]) -> UsageError:
    """Make the error for a metric that a run lacks, with the nearest names."""
    near = near_names(pattern, names)
    hint = f"the nearest: {', '.join(near)}" if near else f"it has {listed(names) or 'none'}"
    return UsageError(f"{folder} has no metric {pattern!r}; {hint}.")


def _flat(emit: Record) -> Iterator[Point]:
    """Yield the points of an emit: each value of a series at its step, each entry of a dict by itself."""
    for metric, value in emit.metrics.items():
        for step, name, item in _leaves(emit.step, metric, value):
            yield emit.epoch, operator.index(step), emit.hook_point.name, name, item


def _leaves(step: int, name: str, value: Any) -> Iterator[tuple[int, str, Any]]:
    if isinstance(value, Series):
        for at, item in zip(value.steps, value.values, strict=True):
            yield from _leaves(at, name, item)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(step, f"{name}/{key}", item)
    else:
        yield step, name, value
