"""Curves in the record of a run: each number at its step."""

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..doctor import series_in
from ..errors import require
from ..hooks import HookPoint, as_float
from ..runs import Record, RunRecord, forward_emits, read_initial, record_of

Floats = NDArray[np.float64]
NUMBERS = frozenset({int, float, bool})
EVALUATED_BY = "training_metrics"
"""The hook that reports evaluations. The commands that read records name it, since its class needs torch."""
ACCURACIES = ("train_acc", "val_acc")  # numbers of an evaluation that are separate metrics


@dataclass(frozen=True)
class MetricCurve:
    """A metric of a run: ascending unique steps and their values; a mean over seeds has half-widths of intervals."""

    steps: Floats
    values: Floats
    half: Floats | None = field(default=None, repr=False)

    @classmethod
    def of_points(cls, steps: Sequence[float], values: Sequence[float]) -> "MetricCurve":
        """Sort points by step, keeping the last of several at one step.

        >>> MetricCurve.of_points([2, 1, 2], [5, 6, 7])
        MetricCurve(steps=array([1., 2.]), values=array([6., 7.]))
        """
        unique_steps, last = np.unique(np.array(steps[::-1], dtype=np.float64), return_index=True)
        return cls(unique_steps, np.array(values[::-1], dtype=np.float64)[last])

    @property
    def finite(self) -> NDArray[np.bool_]:
        """Whether each value is finite."""
        return np.isfinite(self.values)


@dataclass(frozen=True)
class DrawnRun:
    """The content of a record."""

    folder: Path
    run: RunRecord
    curves: Mapping[str, MetricCurve]  # the selected metrics, by full name, in the order of the record
    names: Sequence[str]  # all metrics with numbers
    others: Sequence[str]  # all metrics with lists or text, which have no curves
    epoch_steps: float = 0.0  # steps per epoch; 0 if no ends of epochs were recorded
    group: str = ""  # the name of the group if the curves are means over seeds

    def in_epochs(self) -> "DrawnRun":
        """Return the run with fractional epochs instead of steps."""
        curves = {name: replace(curve, steps=curve.steps / self.epoch_steps) for name, curve in self.curves.items()}
        return replace(self, curves=curves)


def read_curves(folder: Path, wanted: Callable[[str], bool]) -> DrawnRun:
    """Read the record in the folder of a run; raises :class:`UsageError` if it is missing or damaged."""
    run = RunRecord.read(folder)
    is_wanted = cache(wanted)
    points: dict[str, tuple[list[float], list[float]]] = {}
    names, others = dict[str, None](), dict[str, None]()
    epoch_steps = set[float]()  # one value per recorded end of an epoch

    def take(step: int, metrics: Mapping[str, Any]) -> None:
        for name, at, numbers in series_in(step, metrics):
            if type(numbers[0]) not in NUMBERS:
                others[name] = None
                continue
            names[name] = None
            if is_wanted(name):
                steps, values = points.setdefault(name, ([], []))
                steps.extend(float(operator.index(step)) for step in at)
                values.extend(map(as_float, numbers))

    def take_emit(emit: Record) -> None:
        if emit.hook_point is HookPoint.POST_EPOCH:
            epoch_steps.add(emit.step / (emit.epoch + 1))
        take(emit.step, emit.metrics)

    sink, path = record_of(folder, run.strategy)
    forward_emits(path, sink.read(path), take_emit)
    # The evaluation at step 0 gets the names that the hook of evaluations gives to later ones.
    evaluation = read_initial(folder)
    if any(name.startswith(f"{EVALUATED_BY}/") for name in names):
        for key, value in evaluation.items():
            take(0, {f"{EVALUATED_BY}/{key}" if key in ACCURACIES else f"{EVALUATED_BY}/evaluation/{key}": value})
    curves = {name: MetricCurve.of_points(*pairs) for name, pairs in points.items()}
    without = [name for name in others if name not in curves]
    return DrawnRun(folder, run, curves, list(names), without, epoch_steps.pop() if len(epoch_steps) == 1 else 0.0)


def check_size(path: Path, most: int) -> None:
    """Raise :class:`UsageError` for a file that is too large."""
    size = path.stat().st_size
    require(size <= most, f"{path} is not read: it has {size:,} bytes, and the limit is {most:,}.")
