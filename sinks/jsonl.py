"""JSONL sink: the lossless record of a run, one JSON object per emit."""

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from loopscope.errors import UsageError
from loopscope.hooks import ALERTS, STEP_POINTS, Alert, HookPoint, Series, SinkRegistry
from loopscope.runs import Record, RunRecord, read_status

from .record import LAYOUTS, NUMBERS, POSITION, json_text
from .run_file import FileSink, complete_lines

if TYPE_CHECKING:
    from loopscope.hooks import RunInfo


@SinkRegistry.register
class JSONLSink(FileSink):
    """Write every metric, lossless, to STRATEGY.jsonl, one JSON object per line, and every alert to alerts.jsonl.

    An object has ``epoch``, ``step``, ``hook_point`` (its name) and the metrics under their full names, in the order of
    the emit. Numbers are exact: integers, floats (in the shortest form that gives the same float) and booleans keep
    their types. Non-finite floats are the bare words ``NaN``, ``Infinity`` and ``-Infinity``, which ``json.loads``
    accepts. A series is ``{"steps": [...], "values": [...]}``. Keys of nested dicts become text, tuples become lists,
    and other objects become their text. :func:`read_jsonl` reads the file. An alert has the fields of
    :meth:`Alert.record`.
    """

    name: ClassVar[str] = "jsonl"
    flag: ClassVar[str | None] = "--hook-jsonl"
    default: ClassVar[bool] = True
    lossless: ClassVar[bool] = True

    @classmethod
    def file_names(cls, strategy: str) -> Sequence[str]:
        """Return the names of the metrics file and the alerts file."""
        return [*super().file_names(strategy), ALERTS]

    def header(self, run: "RunInfo", position: Mapping[str, Any]) -> str:
        """Return an empty text: a JSONL file has no header."""
        return ""

    def emit(self, metrics: Mapping[str, Any], epoch: int, hook_point: HookPoint, *, step: int) -> None:
        """Append one line; raises ``ValueError`` for a metric named like a field of the position."""
        if not metrics.keys().isdisjoint(POSITION):
            raise ValueError(f"No metric may be named {', '.join(POSITION)}; name metrics hook/metric.")
        text = _of_one_step(metrics) if hook_point in STEP_POINTS else None
        fields = f",{(text or json_text(metrics))[1:]}" if metrics else "}"
        self._write(f'{{"epoch":{epoch},"step":{step},"hook_point":"{hook_point.name}"{fields}\n')

    def alert(self, alerts: Sequence[Alert]) -> None:
        """Append a line for each alert."""
        self._write("".join(f"{json_text(alert.record())}\n" for alert in alerts), file=1)

    @classmethod
    def read(cls, path: Path) -> Iterator[Record]:
        """Yield the emits of a :class:`JSONLSink` in order; a truncated last line is skipped.

        At step-level points an object with only ``steps`` and ``values`` becomes a :class:`Series`.
        """
        for line in complete_lines(path):
            fields = json.loads(line)
            epoch, step, point = fields.pop("epoch"), fields.pop("step"), HookPoint[fields.pop("hook_point")]
            if point in STEP_POINTS:
                for name, value in fields.items():
                    if isinstance(value, dict) and value.keys() == {"steps", "values"}:
                        fields[name] = Series(**value)
            yield Record(epoch, step, point, fields)


read_jsonl = JSONLSink.read


def _of_one_step(metrics: Mapping[str, Any]) -> str | None:
    """Return the JSON of series with one plain number each at the same step; ``None`` for other metrics."""
    # A run that flushes at every step emits these; json_text takes twice as long for their lists.
    if set(map(type, metrics.values())) != {Series}:
        return None
    steps = next(iter(metrics.values())).steps
    numbers = [series.values[0] for series in metrics.values() if series.steps == steps]
    if len(steps) != 1 or len(numbers) < len(metrics) or not NUMBERS.issuperset(map(type, numbers)):
        return None
    texts = json_text(numbers)[1:-1].split(",")
    between = f'{{"steps":{json_text(steps)},"values":['
    pairs = zip(_keys(tuple(metrics)), texts, strict=True)
    return "{" + ",".join([f"{key}{between}{text}]}}" for key, text in pairs]) + "}"


@lru_cache(LAYOUTS)
def _keys(names: tuple[str, ...]) -> list[str]:
    return [f"{json_text(name)}:" for name in names]


def recorded_run(folder: Path) -> tuple[RunRecord, Path, str]:
    """Return the description of the run in a folder, its JSONL file and its status, for :meth:`ReplaySink.replay`.

    Raises:
        UsageError: if the folder has no run, or the run has no record.
    """
    run = RunRecord.read(folder)
    path = folder / f"{run.strategy}.jsonl"
    if not path.is_file():
        raise UsageError(
            f"{folder} has no {path.name}, the record that replay sends; a run writes it unless the sink 'jsonl' is "
            "disabled."
        )
    return run, path, read_status(folder) or "failed"  # a run without a summary was killed
