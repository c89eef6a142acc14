"""The history of a run as detectors see it: metrics over steps, newest losses, alerts, start-up facts and settings."""

import math
import operator
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..hooks import Alert, Recovery, Series, as_float
from .step_times import StepTimes

MOST_POINTS = 4096
"""Points of a metric in memory; above this number every second one is dropped."""
MOST_METRICS = 4096
MOST_ALERTS = 2000
STEP_LOSSES = ("training_metrics/loss", "training_checks/loss")
"""Losses of single steps, of all steps where a loop reports them, or of those that are checked."""
MOST_RECENT = 100
"""Losses of single steps that are kept."""
NUMBERS = (int, float, bool)
Floats = NDArray[np.float64]


def median_of(values: Floats) -> float:
    """Return the median of the finite values, which single outliers do not move; NaN without any."""
    finite = values[np.isfinite(values)]
    return float(np.median(finite)) if len(finite) else math.nan


class Curve:
    """The values of a metric over steps, thinned to a limited number of points; the last point is always kept."""

    def __init__(self) -> None:
        self._steps: list[int] = []
        self._values: list[float] = []
        self._stride = 1
        self._seen = 0
        self._last: tuple[int, float] | None = None
        self.first_nonfinite: int | None = None
        """The first step with a NaN or infinite value."""

    def add(self, step: int, value: float) -> None:
        """Append a point; steps do not decrease."""
        if self.first_nonfinite is None and not math.isfinite(value):
            self.first_nonfinite = step
        if self._seen % self._stride == 0:
            self._steps.append(step)
            self._values.append(value)
        self._seen += 1
        self._last = step, value
        if len(self._steps) > MOST_POINTS:
            self._steps, self._values, self._stride = self._steps[::2], self._values[::2], self._stride * 2

    @classmethod
    def of_points(cls, steps: Sequence[float], values: Sequence[float]) -> "Curve":
        """Return the curve that :meth:`add` makes of these points, at once.

        >>> Curve.of_points([1, 2, 4], [3.0, math.inf, 5.0]).first_nonfinite
        2
        """
        curve, count = cls(), len(steps)
        while count > MOST_POINTS * curve._stride:
            curve._stride *= 2
        curve._seen = count
        curve._steps = list(map(int, steps[:: curve._stride]))
        curve._values = list(map(float, values[:: curve._stride]))
        if count:
            curve._last = int(steps[-1]), float(values[-1])
            nonfinite = np.flatnonzero(~np.isfinite(np.asarray(values, dtype=np.float64)))
            curve.first_nonfinite = int(steps[int(nonfinite[0])]) if len(nonfinite) else None
        return curve

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def steps(self) -> NDArray[np.int64]:
        """The steps of the points, ascending: shape (points,)."""
        return np.array([*self._steps, *self._extra[0]], dtype=np.int64)

    @property
    def values(self) -> Floats:
        """The values of the points: shape (points,)."""
        return np.array([*self._values, *self._extra[1]], dtype=np.float64)

    @property
    def _extra(self) -> tuple[list[int], list[float]]:
        if self._last is None or (self._steps and self._steps[-1] == self._last[0]):
            return [], []
        return [self._last[0]], [self._last[1]]

    @property
    def first(self) -> float:
        """The first value; NaN for an empty curve."""
        return self._values[0] if self._values else math.nan

    @property
    def last(self) -> float:
        """The newest value; NaN for an empty curve."""
        return self._last[1] if self._last else math.nan

    @property
    def first_step(self) -> int:
        """The step of the first value; 0 for an empty curve."""
        return self._steps[0] if self._steps else 0

    @property
    def last_step(self) -> int:
        """The step of the newest value; 0 for an empty curve."""
        return self._last[0] if self._last else 0

    @property
    def median(self) -> float:
        """The median of the finite values; NaN without any."""
        return median_of(self.values)

    def start_level(self, points: int = 5) -> float:
        """Return the median of the first points."""
        return median_of(self.values[:points])

    def end_level(self) -> float:
        """Return the median of the last tenth of the points, of at least 5."""
        return median_of(self.values[-max(5, len(self.values) // 10) :])

    def at(self, step: int) -> float:
        """Return the newest value up to a step; NaN if there is none."""
        if self._last is not None and step >= self._last[0]:
            return self._last[1]
        index = bisect_right(self._steps, step) - 1  # without the arrays, since detectors ask at every step of a curve
        return self._values[index] if index >= 0 else math.nan

    def between(self, first: int, last: int) -> Floats:
        """Return the values at the steps from ``first`` to ``last``, both included."""
        steps = self.steps
        return self.values[(steps >= first) & (steps <= last)]

    def first_step_where(self, condition: NDArray[np.bool_]) -> int | None:
        """Return the first step at which a condition on :attr:`values` holds, or ``None``."""
        indices = np.flatnonzero(condition)
        return int(self.steps[indices[0]]) if len(indices) else None


EMPTY = Curve()
"""The curve of a metric that was not recorded."""


class RecentLosses:
    """The newest losses of single steps, at most ``MOST_RECENT`` of each metric, with their steps."""

    def __init__(self) -> None:
        self._losses: dict[str, deque[tuple[int, float]]] = {}

    def add(self, metrics: Mapping[str, Any]) -> None:
        """Add the losses in the metrics of one emit; a loss that is no series is that of an epoch, and left out."""
        for name in STEP_LOSSES:
            series = metrics.get(name)
            if isinstance(series, Series):
                points: Sequence[tuple[int, Any]] = [*zip(series.steps, series.values, strict=True)][-MOST_RECENT:]
                losses = self._losses.setdefault(name, deque(maxlen=MOST_RECENT))
                losses.extend((int(step), as_float(loss)) for step, loss in points if isinstance(loss, NUMBERS))

    def clear(self) -> None:
        """Forget all losses, before another run."""
        self._losses.clear()

    @property
    def newest_step(self) -> int:
        """The step of the newest loss, 0 without losses."""
        recent = self._of_one_metric()
        return recent[-1][0] if recent else 0

    def _of_one_metric(self) -> Sequence[tuple[int, float]]:
        return next((self._losses[name] for name in STEP_LOSSES if self._losses.get(name)), ())

    def final_loss(self, step: int, mean: float | None, epochs: int, *, is_partial: bool = False) -> dict[str, Any]:
        """Return the final loss up to a step, of what it is the mean, and the loss of the last step, for a summary.

        After several epochs it is the mean of the last one. Otherwise, and within an epoch, it is the mean over the
        last tenth of the steps, at most ``MOST_RECENT``, so that it is not the mean since the start; of those steps
        whose losses are recorded.

        Args:
            step: the number of steps of the run.
            mean: the mean loss since the start of the last epoch or interval, or ``None``.
            epochs: the number of epochs, 0 in a loop that counts steps.
            is_partial: whether that epoch has not ended.
        """
        recent = self._of_one_metric()
        count = min(MOST_RECENT, max(1, step // 10))
        losses = [loss for at, loss in recent if at > step - count]
        over = "interval" if not epochs else "part of the epoch" if is_partial else "epoch"
        if losses and (epochs <= 1 or is_partial):
            mean = math.fsum(losses) / len(losses) if all(map(math.isfinite, losses)) else losses[-1]
            part = f"{len(losses)} of the last" if len(losses) < count else "last"
            over = "last step" if count == 1 else f"{part} {count} steps"
        last = recent[-1][1] if recent and recent[-1][0] == step else None
        return {"training_loss": mean, "training_loss_over": over, "last_loss": last}


@dataclass
class History:
    """What a run has recorded up to now.

    Detectors read it by the full names of metrics (``hook/metric``). It is filled from the emits of a run in progress,
    or from the record of a finished one, so that both give the same findings.
    """

    facts: Mapping[str, Any] = field(default_factory=dict)
    """Start-up facts (:func:`.start_facts`)."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The settings of the training: optimizer, learning rate, batch size, and those of a Trainer."""
    planned_steps: int | None = None
    """Planned steps of the run; ``None`` if unknown."""
    hooks: Sequence[str] = ()
    """Names of the requested hooks, with those that were left out because they do not suit the training."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """The reasons of hooks that were left out, by their names."""
    status: str = "running"
    """The status of the run: running, completed, incomplete, failed or interrupted."""
    step: int = 0
    """The newest step with a metric."""
    first_epoch_end: int = 0
    """The newest step that is known to belong to the first epoch."""
    curves: dict[str, Curve] = field(default_factory=dict)
    recent_losses: RecentLosses = field(default_factory=RecentLosses)
    """The losses of the newest steps."""
    alerts: list[dict[str, Any]] = field(default_factory=list)
    """The alerts as in ``alerts.jsonl``, without recoveries, oldest first."""

    step_times: StepTimes | None = None
    """The time of a step by phase: of a run that has ended, or for a diagnosis that its scope gives."""

    def add(self, step: int, metrics: Mapping[str, Any], epoch: int | None = None) -> None:
        """Add the metrics of one emit, by full name; lists and texts are left out."""
        if epoch == 0:
            self.first_epoch_end = max(self.first_epoch_end, step)
        for name, at, values in series_in(step, metrics):
            curve = self.curves.get(name)
            if not isinstance(values[0], NUMBERS):
                continue
            if curve is None:
                if len(self.curves) >= MOST_METRICS:
                    continue
                curve = self.curves[name] = Curve()
            for point, value in zip(at, values, strict=True):
                curve.add(operator.index(point), as_float(value))
        self.recent_losses.add(metrics)
        self.step = max(self.step, step)

    def add_alert(self, alert: Alert | Mapping[str, Any]) -> None:
        """Add an alert; a recovery is left out."""
        content = alert.record() if isinstance(alert, Alert) else dict(alert)
        is_over = isinstance(alert, Recovery) or content.get("is_over", False)
        if not is_over and len(self.alerts) < MOST_ALERTS:
            self.alerts.append(content)

    def curve(self, name: str) -> Curve:
        """Return the curve of a metric; an empty one if it was not recorded."""
        return self.curves.get(name, EMPTY)

    def family(self, name: str) -> dict[str, Curve]:
        """Return the curves of a family ``hook/metric/<parameter>``, by parameter."""
        prefix = f"{name}/"
        return {key.removeprefix(prefix): curve for key, curve in self.curves.items() if key.startswith(prefix)}

    def last(self, name: str) -> float:
        """Return the newest value of a metric; NaN if it was not recorded."""
        return self.curve(name).last

    def alerts_of(self, hook: str, *metrics: str) -> list[dict[str, Any]]:
        """Return the alerts of a hook about one of these metrics or conditions; without any, all of its alerts."""
        return [alert for alert in self.alerts if alert["hook"] == hook and (not metrics or alert["metric"] in metrics)]

    @property
    def loss(self) -> Curve:
        """The training loss of the steps, or, where no hook recorded these, of the epochs."""
        names = ("training_checks/loss", "training_metrics/loss")
        return max((self.curve(name) for name in names), key=len)

    @property
    def loss_fall(self) -> float:
        """By which share of its initial value the training loss has fallen; negative if it has risen.

        NaN with fewer than 10 points, and for losses that are not positive.
        """
        first, last = self.loss.start_level(), self.loss.end_level()
        return 1 - last / first if len(self.loss) >= 10 and first > 0 and last >= 0 else math.nan

    def falls_short(self, share: float) -> bool:
        """Return whether the training loss has fallen by less than a share of its initial value, or is not finite."""
        return self.loss.first_nonfinite is not None or self.loss_fall < share

    @property
    def uniform_loss(self) -> float:
        """ln(C) of a cross-entropy over C classes, the loss of equal probabilities; NaN for other losses."""
        loss = self.last("training_checks/uniform_loss")
        return loss if loss > 0 else math.nan

    @property
    def update_ratios(self) -> Curve:
        """‖Δθ‖/‖θ‖ over all trainable parameters; in older records from the hook that measured it most often."""
        hooks = ("training_checks/", "parameter_norms/total_", "training_diagnostics/")
        return max((self.curve(f"{hook}update_ratio") for hook in hooks), key=len)

    @property
    def gradient_norms(self) -> Curve:
        """The joint gradient norm before clipping, of every step where a hook measured it."""
        names = ("training_checks/grad_norm", "parameter_norms/total_grad_norm")
        return max((self.curve(name) for name in names), key=len)

    @property
    def is_over(self) -> bool:
        """Whether the run has ended."""
        return self.status != "running"

    @property
    def optimizer(self) -> str:
        """The class name of the first optimizer, or an empty text."""
        groups = self.facts.get("groups") or [{}]
        return str(groups[0].get("optimizer", self.settings.get("optimizer", "")))

    @property
    def is_adam_like(self) -> bool:
        """Whether the optimizer divides gradients by their size, so that a step has about the learning rate's size."""
        return any(word in self.optimizer.lower() for word in ("adam", "adafactor", "lion", "lamb", "rmsprop", "radam"))


def series_in(step: int, metrics: Mapping[str, Any]) -> Iterator[tuple[str, Sequence[int], Sequence[Any]]]:
    """Yield names with steps and values, all numbers or one other value; a dict gives curves ``metric/key``."""
    for name, value in metrics.items():
        if isinstance(value, Mapping):
            yield from series_in(step, {f"{name}/{key}": item for key, item in value.items()})
        elif not isinstance(value, Series):
            yield name, [step], [value]
        elif len(value.steps) != len(value.values):
            raise ValueError(f"{name} has {len(value.values)} values at {len(value.steps)} steps")
        elif not all(issubclass(kind, NUMBERS) for kind in {*map(type, value.values)}):
            for at, item in zip(value.steps, value.values, strict=True):
                yield from series_in(at, {name: item})
        elif value.values:
            yield name, value.steps, value.values
