"""The runs in a folder: their state, summary, and metrics as pandas data frames."""

import operator
import os
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_type_hints

from ..checkpoints import is_locked
from ..doctor import series_in
from ..durable_files import path_exists, read_json
from ..errors import UsageError, listed, require, warn
from ..names import as_names
from ..optional_packages import require_package
from ..runs import (
    CONFIG,
    READ,
    SUMMARY,
    Completed,
    FailedSink,
    Record,
    RunRecord,
    changes_text,
    checked_fields,
    forward_emits,
    record_of,
)
from .panels import matcher, near_names

if TYPE_CHECKING:
    import pandas

COLUMNS = ["epoch", "step", "hook_point", "metric", "value"]
Point = tuple[int, int, str, str, Any]  # the values of these columns
SUMMARY_FIELDS = {  # the fields read from a summary
    **get_type_hints(Completed),
    **{"status": str, "error": str | None, "steps": int, "training_loss": float | None},
    **dict.fromkeys(("initial", "final"), Mapping[str, Any]),
}


OPTIONAL_FIELDS = {"sink_errors": Sequence[FailedSink], "training_loss_over": str, "last_loss": float | None}
"""Fields that the summaries of earlier versions lack."""


@dataclass(frozen=True)
class FoundRun:
    """The content of a run's folder; metrics are read on first use.

    ``state`` is completed, incomplete, failed or interrupted; running (a process holds the lock), killed (neither lock
    nor summary) or damaged, with a sentence in ``problem``; a finished run with changed files has one, too. ``summary``
    is empty before the end of the run.
    """

    path: Path
    state: str
    record: RunRecord | None = field(default=None, repr=False)
    summary: Mapping[str, Any] = field(default_factory=dict, repr=False)
    problem: str = ""

    @property
    def config(self) -> Mapping[str, Any]:
        """The options of the experiment, by name."""
        return {} if self.record is None else self.record.config

    @property
    def began(self) -> float:
        """The time when the options were written, in seconds since the epoch; 0 if unknown."""
        try:
            return (self.path / CONFIG).stat().st_mtime
        except OSError:  # the file is missing, or the folder unreadable
            return 0.0

    @property
    def length(self) -> tuple[int, int] | None:
        """Completed epochs and steps; before the end of the run, those of the last emit, if any."""
        if self.summary:
            return self.summary["epochs"], self.summary["steps"]
        last = deque[Record](maxlen=1)
        try:
            self._read(last)
        except UsageError:
            return None
        return (last[0].epoch, last[0].step) if last else None

    def _read(self, emits: deque[Record]) -> deque[Record]:
        strategy = (self.record or RunRecord.read(self.path)).strategy
        sink, path = record_of(self.path, strategy)
        forward_emits(path, sink.read(path), emits.append)
        return emits

    @cached_property
    def points(self) -> Sequence[Point]:
        """All values with epoch, step, hook point and name, in order; raises :class:`UsageError` without a record."""
        return [
            (emit.epoch, operator.index(step), emit.hook_point.name, name, value)
            for emit in self._read(deque())
            for name, steps, values in series_in(emit.step, emit.metrics)
            for step, value in zip(steps, values, strict=True)
        ]

    @cached_property
    def names(self) -> list[str]:
        """The metrics in the order of the record; an entry of a dict is named ``metric/key``."""
        return list(dict.fromkeys(name for *_, name, _ in self.points))

    def matching(self, patterns: str | Sequence[str]) -> list[str]:
        """Return the metrics that match a pattern, or one of several, like those of ``loopscope plot``.

        An empty list of patterns matches all metrics.

        Raises:
            UsageError: for a pattern without a match, with the nearest names.
        """
        patterns = as_names(patterns)
        matches = {pattern: list(filter(matcher([pattern]), self.names)) for pattern in patterns}
        for pattern in [pattern for pattern, names in matches.items() if not names]:
            near = near_names(pattern, self.names)
            hint = f"the nearest: {', '.join(near)}" if near else f"it has {listed(self.names) or 'none'}"
            raise UsageError(f"{self.path} has no metric {pattern!r}; {hint}.")
        return list(dict.fromkeys(name for names in matches.values() for name in names)) if patterns else self.names

    @property
    def metrics(self) -> "pandas.DataFrame":
        """All values as rows of ``epoch``, ``step``, ``hook_point``, ``metric`` and ``value``, in order."""
        import pandas

        return pandas.DataFrame(self.points, columns=COLUMNS)

    def frame(self, *patterns: str, by: Literal["step", "epoch"] = "step") -> "pandas.DataFrame":
        """Return the matching metrics, one per column, with a row per step at which one of them has a value.

        The last of several values in a row counts; a metric without a value is missing (NaN). Lists and texts are
        objects. With ``by="epoch"`` rows are epochs, counted from 0.
        """
        import pandas

        require(by in ("step", "epoch"), f"by is {by!r}; it must be step or epoch.")
        values: dict[str, dict[int, Any]] = {name: {} for name in self.matching(patterns)}
        for epoch, step, _, name, value in self.points:
            if name in values:
                values[name][epoch if by == "epoch" else step] = value
        columns = {name: pandas.Series(by_row) for name, by_row in values.items()}
        return pandas.DataFrame(columns).sort_index().rename_axis(index=by)


def read_run(path: str | os.PathLike[str]) -> FoundRun:
    """Read the folder of a run, ``OUTPUT_DIR/EXPERIMENT/STRATEGY``, for pandas.

    Raises:
        UsageError: if the folder has no readable run, or pandas is not installed.
    """
    require_package("pandas", "loopscope.read_run")
    run = inspect_run(Path(path))
    require(run.record is not None, run.problem)
    if run.problem:
        warn(run.problem, stacklevel=2)
    return run


def inspect_run(folder: Path, read: Collection[str] = READ) -> FoundRun:
    """Read the folder of a run; a damaged folder does not raise, but gives a run with a problem.

    Files with the endings ``read`` are compared with their digests, others only if they were modified.
    """
    record, path = None, folder / SUMMARY
    try:
        record = RunRecord.read(folder)
        if is_locked(folder) or not path_exists(path):
            return FoundRun(folder, "running" if is_locked(folder) else "killed", record)
        content = read_json(path)
        present = {name: kind for name, kind in OPTIONAL_FIELDS.items() if name in content}
        summary = checked_fields(content, SUMMARY_FIELDS | present, path)
    except UsageError as error:
        return FoundRun(folder, "damaged", record, problem=str(error))
    for name in ("initial", "final"):
        summary[name] = {key: value for key, value in summary[name].items() if isinstance(value, (int, float))}
    if record is not None:
        summary["experiment"] = record.experiment
    left_out = content.get("hooks_left_out")
    summary |= {name: content.get(name) for name in ("step_time", "peak_memory")}
    summary["hooks_left_out"] = [str(name) for name in left_out] if isinstance(left_out, Mapping) else []
    return FoundRun(folder, summary["status"], record, summary, changes_text(folder, read))
