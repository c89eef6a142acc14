"""The lossless record of a run: one JSON object per emit."""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

from loopscope.hooks import STEP_POINTS, HookPoint, RunInfo, Series, SinkRegistry
from loopscope.runs import RecordSink

from .record import LAYOUTS, Record, in_runs, in_step, number_texts, plain
from .run_file import RunFile, complete_lines

POSITION = ("epoch", "step", "hook_point")
_encode = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode
_WORDS = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity", "True": "true", "False": "false"}


@SinkRegistry.register
class JSONLSink(RecordSink):
    """Write every metric, lossless, to STRATEGY.jsonl: one JSON object per line.

    An object has ``epoch``, ``step``, ``hook_point`` (its name) and the metrics under their full names, in the order
    in which they came. Numbers are exact: integers, floats (shortest form that reads back the same) and booleans
    keep their types. Non-finite floats are the bare words ``NaN``, ``Infinity`` and ``-Infinity``, which
    ``json.loads`` reads. A series is ``{"steps": [...], "values": [...]}``. Keys of nested dicts become text, tuples
    lists; any other object becomes its text. :func:`read_jsonl` reads the file back.
    """

    name: ClassVar[str] = "jsonl"
    flag: ClassVar[str | None] = "--hook-jsonl"
    lossless: ClassVar[bool] = True

    def __init__(self) -> None:
        self._file = RunFile(".jsonl")

    def set_run_context(self, run: RunInfo) -> None:
        """Start the strategy's file."""
        self._file.open(run)

    def emit(self, metrics: Mapping[str, Any], epoch: int, hook_point: HookPoint, *, step: int) -> None:
        """Append one line; raises ``ValueError`` for a metric named like a field of the position."""
        body = _fields(metrics, hook_point)
        self._file.write(f'{{"epoch":{epoch},"step":{step},"hook_point":"{hook_point.name}"{body}}}\n')

    def position(self) -> dict[str, Any]:
        """Return the size of the file."""
        return {"size": self._file.size}

    def files(self) -> Sequence[Path]:
        """Name the strategy's file."""
        return self._file.paths

    def resume(self, run: RunInfo, position: Mapping[str, Any]) -> None:
        """Go on in the strategy's file, cut back to the position."""
        self._file.resume(run, position["size"])

    def flush(self) -> None:
        """Force everything emitted so far onto the disk."""
        self._file.flush()

    def close(self, status: str) -> None:
        """Close the strategy's file."""
        self._file.close()

    @classmethod
    def read(cls, path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
        """Yield step and metrics of each line."""
        return ((record.step, record.metrics) for record in read_jsonl(path))


def _fields(metrics: Mapping[str, Any], point: HookPoint) -> str:
    """Return what follows the position: quickly where all are plain numbers, or series with the same steps."""
    keys = _keys(tuple(metrics))
    series = in_step(metrics.values()) if point in STEP_POINTS else None
    numbers = _numbers(metrics.values() if series is None else list(chain.from_iterable(series[1])))
    if numbers is None:
        return "," + _encoded({name: _shown(value) for name, value in metrics.items()})[1:-1]
    return _woven(keys, numbers) if series is None else _woven(keys, *_series_texts(series[0], len(keys), numbers))


@lru_cache(LAYOUTS)
def _keys(names: tuple[str, ...]) -> list[str]:
    """Return what comes before each metric's value."""
    if not set(POSITION).isdisjoint(names):
        raise ValueError(f"A metric is named {', '.join(POSITION)} or one of them; metrics are named hook/metric.")
    return [f",{_encode(name)}:" for name in names]


def _woven(*columns: list[str]) -> str:
    """Join texts row by row.

    >>> _woven(["a:", "b:"], ["1;", "2"])
    'a:1;b:2'
    """
    pieces = [""] * (len(columns) * len(columns[0]))
    for index, column in enumerate(columns):
        pieces[index :: len(columns)] = column
    return "".join(pieces)


def _numbers(values: Collection[Any]) -> list[str] | None:
    """Return the JSON text of every value, or nothing unless all of them are plain numbers."""
    texts = number_texts(values)
    if texts is None or _WORDS.keys().isdisjoint(texts):
        return texts
    return [_WORDS.get(text, text) for text in texts]


def _series_texts(steps: list[int], count: int, numbers: list[str]) -> tuple[list[str], list[str], list[str]]:
    """Return the JSON texts of ``count`` series with the same steps, each in three parts."""
    opening = f'{{"steps":[{",".join(map(str, steps))}],"values":['
    values = numbers if len(steps) == 1 else in_runs(numbers, count, len(steps), ",")
    return [opening] * count, values, ["]}"] * count


def _encoded(metrics: dict[str, Any]) -> str:
    try:
        return _encode(metrics)
    except TypeError:
        return _encode(plain(metrics))


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
