"""The lossless record of a run: one JSON object per emit."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from framework.contexts import RunInfo
from framework.hook_points import STEP_POINTS, HookPoint
from framework.metrics import MetricSink, Series
from framework.registry import SinkRegistry
from sinks.record import Record, plain
from sinks.run_file import RunFile, complete_lines

POSITION = ("epoch", "step", "hook_point")
_encode = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode


@SinkRegistry.register
class JSONLSink(MetricSink):
    """Write every metric, lossless, to STRATEGY.jsonl: one JSON object per line.

    An object has ``epoch``, ``step``, ``hook_point`` (its name) and the metrics under their full names, in the order
    in which they came. Numbers are exact: integers, floats (shortest form that reads back the same) and booleans
    keep their types. Non-finite floats are the bare words ``NaN``, ``Infinity`` and ``-Infinity``, which
    ``json.loads`` reads. A series is ``{"steps": [...], "values": [...]}``. Keys of nested dicts become text, tuples
    lists; any other object becomes its text. :func:`read_jsonl` reads the file back.
    """

    name: ClassVar[str] = "jsonl"
    flag: ClassVar[str | None] = "--hook-jsonl"

    def __init__(self) -> None:
        self._file = RunFile(".jsonl")

    def set_run_context(self, run: RunInfo) -> None:
        """Start the strategy's file."""
        self._file.open(run)

    def emit(self, metrics: Mapping[str, Any], epoch: int, hook_point: HookPoint, *, step: int) -> None:
        """Append one line; raises ``ValueError`` for a metric named like a field of the position."""
        if not metrics.keys().isdisjoint(POSITION):
            raise ValueError(f"A metric is named {', '.join(POSITION)} or one of them; metrics are named hook/metric.")
        record = {"epoch": epoch, "step": step, "hook_point": hook_point.name}
        if hook_point in STEP_POINTS:
            metrics = {name: _shown(value) for name, value in metrics.items()}
        try:
            line = _encode({**record, **metrics})
        except TypeError:
            line = _encode({**record, **plain(metrics)})
        self._file.write(line + "\n")

    def flush(self) -> None:
        """Force everything emitted so far onto the disk."""
        self._file.flush()

    def close(self, status: str) -> None:
        """Close the strategy's file."""
        self._file.close()


def _shown(value: Any) -> Any:
    return {"steps": value.steps, "values": value.values} if isinstance(value, Series) else value


def read_jsonl(path: Path) -> Iterator[Record]:
    """Yield the emits that a :class:`JSONLSink` wrote, in order; a last line cut off by a crash is left out.

    At step-level points an object with just ``steps`` and ``values`` comes back as a :class:`Series`.
    """
    for line in complete_lines(path):
        fields = json.loads(line)
        epoch, step, name = (fields.pop(field) for field in POSITION)
        point = HookPoint[name]
        if point in STEP_POINTS:
            fields = {name: _series(value) for name, value in fields.items()}
        yield Record(epoch, step, point, fields)


def _series(value: Any) -> Any:
    is_series = isinstance(value, dict) and value.keys() == {"steps", "values"}
    return Series(**value) if is_series else value
