"""From a hook's return value to the sinks: naming, buffering, one transfer to the host, failing sinks."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from framework.contexts import RunInfo
from framework.errors import StateMutationError
from framework.hook_points import STEP_POINTS, HookPoint
from framework.hooks import TrainingHook
from framework.isolation import Call, Isolation
from framework.metrics import Metrics, MetricSink, PendingMetrics, Series


@dataclass(frozen=True, slots=True)
class Report:
    """Where a set of metrics came from."""

    hook: TrainingHook
    point: HookPoint
    step: int


Arrived = tuple[Report, dict[str, Any]]


class MetricDispatch:
    """Holds metrics until their fire (epoch-level points) or their flush (step-level points) and delivers them."""

    def __init__(self, isolation: Isolation, sinks: Sequence[MetricSink], run_hook: Callable[..., Any]) -> None:
        """Make a dispatch; ``run_hook(hook, where, step, function)`` calls hook code through the isolation."""
        self._isolation = isolation
        self._sinks = list(sinks)
        self._run_hook = run_hook
        self._now: tuple[PendingMetrics, list[Report]] = (PendingMetrics(), [])
        self._steps: tuple[PendingMetrics, list[Report]] = (PendingMetrics(), [])
        self._last: list[dict[str, Any]] = [{} for _ in HookPoint]
        self._newest: dict[str, Any] = {}
        self.follows_snapshots = any(type(sink).snapshot is not MetricSink.snapshot for sink in sinks)

    @property
    def has_steps(self) -> bool:
        """Tell whether step metrics wait for a flush."""
        return bool(self._steps[1])

    def last(self, point: HookPoint | None) -> dict[str, Any]:
        """Return the newest metrics of one point, or of all points, by full name."""
        return dict(self._newest if point is None else self._last[point])

    def add(self, hook: TrainingHook, point: HookPoint, step: int, metrics: Metrics) -> None:
        """Take the metrics of one hook call."""
        if not metrics:
            return
        pending, reports = self._steps if point in STEP_POINTS else self._now
        kept = pending.add(metrics)
        reports.append(Report(hook, point, step))
        last, prefix = self._last[point], hook.name + "/"
        for name, value in kept.items():
            last[prefix + name] = self._newest[prefix + name] = value

    def deliver(self, point: HookPoint, epoch: int, step: int) -> None:
        """Bring the metrics of an epoch-level fire to the host and emit them together."""
        pending, reports = self._now
        merged: dict[str, Any] = {}
        arrived = _arrived(pending, reports)
        for report, values in arrived:
            merged |= {f"{report.hook.name}/{name}": value for name, value in values.items()}
        if merged:
            self._last[point] |= merged
            self._newest |= merged
            self._emit(merged, epoch, point, step)
        self._show(arrived)

    def flush_steps(self, epoch: int) -> None:
        """Bring the buffered step metrics to the host and emit one series per metric and hook point."""
        pending, reports = self._steps
        by_point: dict[HookPoint, dict[str, Series]] = {}
        last_step = 0
        arrived = _arrived(pending, reports)
        for report, values in arrived:
            table = by_point.setdefault(report.point, {})
            last_step = max(last_step, report.step)
            for name, value in values.items():
                series = table.setdefault(f"{report.hook.name}/{name}", Series([], []))
                series.steps.append(report.step)
                series.values.append(value)
        for point in sorted(by_point):
            self._emit(by_point[point], epoch, point, last_step)
        self._show(arrived)

    def _show(self, arrived: list[Arrived]) -> None:
        """Let every hook look at its values, all of a delivery in one call, once these are safe in the sinks."""
        checking: dict[TrainingHook, list[tuple[int, dict[str, Any]]]] = {}
        for report, values in arrived:
            if type(report.hook).check is not TrainingHook.check:
                checking.setdefault(report.hook, []).append((report.step, values))
        for hook, rows in checking.items():
            self._run_hook(hook, "check", rows[-1][0], partial(_check, hook, rows))

    # Sinks

    def start(self, run: RunInfo) -> None:
        """Announce a strategy to the sinks."""
        self._each(0, lambda sink: sink.set_run_context(run))

    def end(self, status: str) -> None:
        """Close the sinks."""
        self._each(0, lambda sink: sink.flush())
        self._each(0, lambda sink: sink.close(status))

    def snapshot(self, epoch: int, step: int) -> None:
        """Tell the sinks that SNAPSHOT has fired."""
        self._each(step, lambda sink: sink.snapshot(epoch, step))

    def _emit(self, metrics: Mapping[str, Any], epoch: int, point: HookPoint, step: int) -> None:
        self._each(step, lambda sink: sink.emit(metrics, epoch, point, step=step))

    def _each(self, step: int, action: Callable[[MetricSink], None]) -> None:
        """Let every sink act; one that fails is dropped with a warning, since losing a metric must not stop a run."""
        for sink in list(self._sinks):
            try:
                self._isolation.observe(Call(sink.name, "an emit", step, "Sink"), lambda s=sink: action(s))  # type: ignore[misc]
            except StateMutationError:
                raise
            except Exception as error:
                self._sinks.remove(sink)
                self._close_failed(sink, step)
                warnings.warn(
                    f"Sink {sink.name!r} failed and is switched off for the rest of the run: "
                    f"{type(error).__name__}: {error}",
                    stacklevel=2,
                )

    def _close_failed(self, sink: MetricSink, step: int) -> None:
        """Let a failed sink release its files; that it may fail at this too is known."""
        try:
            self._isolation.observe(Call(sink.name, "its end", step, "Sink"), lambda: sink.close("failed"))
        except StateMutationError:
            raise
        except Exception:
            pass


def _check(hook: TrainingHook, rows: list[tuple[int, dict[str, Any]]]) -> None:
    for step, values in rows:
        hook.check(values, step)


def _arrived(pending: PendingMetrics, reports: list[Report]) -> list[Arrived]:
    """Empty a buffer in one transfer to the host."""
    arrived = list(zip(list(reports), pending.to_host(), strict=True))
    reports.clear()
    return arrived
