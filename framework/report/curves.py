"""The curves in the record of a run: each number at its step."""

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import UsageError, require
from ..hooks import HookPoint, HookRegistry, Series, SinkRegistry
from ..runs import Record, RecordSink, RunRecord, forward_emits, read_initial

Floats = NDArray[np.float64]
NUMBERS = frozenset({int, float, bool})
MOST_LINE = 2**26  # bytes of a line in a file of lines; one with more is not read
ACCURACIES = ("train_acc", "val_acc")  # of an evaluation: metrics by themselves, beside the other numbers


@dataclass(frozen=True)
class Curve:
    """A metric of a run: ascending steps, each once, and as many values; over seeds with half of their intervals."""

    steps: Floats
    values: Floats
    half: Floats | None = field(default=None, repr=False)

    @classmethod
    def of_points(cls, steps: Sequence[float], values: Sequence[float]) -> "Curve":
        """Sort points by step; of several at one step the last stays.

        >>> Curve.of_points([2, 1, 2], [5, 6, 7])
        Curve(steps=array([1., 2.]), values=array([6., 7.]))
        """
        at, last = np.unique(np.array(steps[::-1], dtype=np.float64), return_index=True)
        return cls(at, np.array(values[::-1], dtype=np.float64)[last])

    @property
    def finite(self) -> NDArray[np.bool_]:
        """Which of the values are finite."""
        return np.isfinite(self.values)


@dataclass(frozen=True)
class RecordedRun:
    """What a record holds."""

    folder: Path
    run: RunRecord
    curves: Mapping[str, Curve]  # the metrics that were wanted, by full name, in the order of the record
    names: Sequence[str]  # all metrics with numbers
    others: Sequence[str]  # all metrics with lists or text, which have no curve
    epoch_steps: float = 0.0  # steps in an epoch; 0 where no ends of epochs were recorded
    group: str = ""  # the name of the runs over whose seeds the curves are means

    def in_epochs(self) -> "RecordedRun":
        """Return the run with epochs, whole and broken, for steps."""
        curves = {name: replace(curve, steps=curve.steps / self.epoch_steps) for name, curve in self.curves.items()}
        return replace(self, curves=curves)


def read_curves(folder: Path, wanted: Callable[[str], bool]) -> RecordedRun:
    """Read the record in the folder of a run; raises :class:`UsageError` where there is none, or a broken one."""
    run = RunRecord.read(folder)
    is_wanted = cache(wanted)
    points: dict[str, tuple[list[float], list[float]]] = {}
    names, others = dict[str, None](), dict[str, None]()
    epoch_steps = set[float]()  # as each end of an epoch has it

    def take(step: int, metrics: Mapping[str, Any]) -> None:
        for name, at, numbers in series_in(step, metrics):
            if type(numbers[0]) not in NUMBERS:
                others[name] = None
                continue
            name.encode()  # no picture can show half a character
            names[name] = None
            if is_wanted(name):
                steps, values = points.setdefault(name, ([], []))
                steps.extend(float(operator.index(step)) for step in at)
                values.extend(map(float, numbers))

    def take_emit(emit: Record) -> None:
        if emit.hook_point is HookPoint.POST_EPOCH:
            epoch_steps.add(emit.step / (emit.epoch + 1))
        take(emit.step, emit.metrics)

    sink, path = record_of(folder, run.strategy)
    forward_emits(path, sink.read(path), take_emit)
    # The evaluation at step 0 goes under the names that hooks which are always on give to later ones.
    evaluation, recorded = read_initial(folder), {name.partition("/")[0] for name in names}
    for hook in [hook.name for hook in HookRegistry if hook.always and hook.name in recorded]:
        for key, value in evaluation.items():
            take(0, {f"{hook}/{key}" if key in ACCURACIES else f"{hook}/evaluation/{key}": value})
    curves = {name: Curve.of_points(*found) for name, found in points.items()}
    without = [name for name in others if name not in curves]
    return RecordedRun(folder, run, curves, list(names), without, epoch_steps.pop() if len(epoch_steps) == 1 else 0.0)


def series_in(step: int, metrics: Mapping[str, Any]) -> Iterator[tuple[str, Sequence[int], Sequence[Any]]]:
    """Yield names with steps and as many values, all numbers or one of any kind; dicts are curves ``metric/key``."""
    for name, value in metrics.items():
        if isinstance(value, Mapping):
            yield from series_in(step, {f"{name}/{key}": item for key, item in value.items()})
        elif not isinstance(value, Series):
            yield name, [step], [value]
        elif len(value.steps) != len(value.values):
            raise ValueError(f"{name} has {len(value.values)} values at {len(value.steps)} steps")
        elif not NUMBERS.issuperset(map(type, value.values)):
            for at, item in zip(value.steps, value.values, strict=True):
                yield from series_in(at, {name: item})
        elif value.values:
            yield name, value.steps, value.values


def record_of(folder: Path, strategy: str) -> tuple[type[RecordSink], Path]:
    """Return the best record in a folder and the sink that wrote it; raises :class:`UsageError` where there is none."""
    readable = [sink for sink in SinkRegistry if issubclass(sink, RecordSink)]
    best_first = sorted(readable, key=lambda sink: not sink.lossless)
    files = {sink: folder / sink.leaves(strategy)[0] for sink in best_first}
    for sink, path in files.items():
        if path.is_file():
            return sink, path
    names = " nor ".join(path.name for path in files.values())
    ways = " or ".join(f"without --no-{str(sink.flag)[2:]}" if sink.default else f"with {sink.flag}" for sink in files)
    raise UsageError(f"{folder} holds neither {names}; a run that is started {ways} writes its metrics there.")


def check_size(path: Path, most: int) -> None:
    """Raise :class:`UsageError` for what is no file, and for a file or a line that would fill the memory."""
    require(path.is_file(), f"{path} is not read: it is no file.")
    size = path.stat().st_size
    require(size <= most, f"{path} is not read: it has {size:,} bytes, and at most {most:,} are read.")
    with path.open("rb") as file:
        longest = max(map(len, iter(partial(file.readline, MOST_LINE + 1), b"")), default=0)
    require(longest <= MOST_LINE, f"{path} is not read: it has a line of more than {MOST_LINE:,} bytes.")
