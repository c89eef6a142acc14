"""From a hook's return value to the sinks: naming, buffering, one transfer to the host, failing sinks."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from ..errors import RunNotice, StateMutationError, UsageError, nearest
from ..hooks import (
    STEP_POINTS,
    Alert,
    HookPoint,
    MetricInfo,
    Metrics,
    MetricSink,
    PendingMetrics,
    RunInfo,
    Series,
    SinkRegistry,
    TrainingHook,
    alerts_caught,
)
from ..isolation import Call, Isolation

RowsOf = Callable[[int], Tensor | None]
"""Gives the rows of a step, where they are known."""
MOST_ROWS = 1024
"""Rows of a batch that an alert names."""


@dataclass(frozen=True, slots=True)
class Report:
    """Where a set of metrics came from."""

    hook: TrainingHook
    point: HookPoint
    step: int


def nobody_knows(step: int) -> Tensor | None:
    """Stand for the rows of a loop that does not tell them."""


Position = Mapping[str, Any]
Positions = Mapping[str, Position | None]


class MetricDispatch:
    """Holds metrics until their fire (epoch-level points) or their flush (step-level points) and delivers them."""

    def __init__(
        self,
        isolation: Isolation,
        sinks: Sequence[MetricSink],
        run_hook: Callable[..., Any],
        rows_of: RowsOf = nobody_knows,
    ) -> None:
        """Make a dispatch; ``run_hook(hook, where, step, function)`` calls hook code through the isolation."""
        self._rows_of = rows_of
        self._isolation = isolation
        self._sinks = list(sinks)
        self._failed: list[MetricSink] = []
        self._run_hook = run_hook
        self._now: PendingMetrics[Report] = PendingMetrics()
        self._steps: PendingMetrics[Report] = PendingMetrics()
        self._started = False
        self._infos: Mapping[str, MetricInfo] = {}
        self._names, self._told = 0, set[str]()
        self._at_end: dict[str, Position | None] | None = None
        self._last: list[dict[str, Any]] = [{} for _ in HookPoint]
        self._newest: dict[str, Any] = {}
        self._alerts: list[Alert] = []
        """Those that no sink was told of."""
        self._follow_snapshots = any(type(sink).snapshot is not MetricSink.snapshot for sink in sinks)

    def last(self, point: HookPoint | None = None) -> dict[str, Any]:
        """Return the newest metrics of one point, or of all points, by full name."""
        return dict(self._newest if point is None else self._last[point])

    def points_of(self, name: str) -> list[str]:
        """Return the names of the hook points at which a hook has returned metrics, before an interruption too."""
        points = zip(HookPoint, self._last, strict=True)
        return [point.name for point, metrics in points if any(key.startswith(f"{name}/") for key in metrics)]

    def add(self, hook: TrainingHook, point: HookPoint, step: int, metrics: Metrics) -> None:
        """Take the metrics of one hook call."""
        if isinstance(metrics, dict) and not metrics:
            return
        pending = self._steps if point in STEP_POINTS else self._now
        kept = pending.add(Report(hook, point, step), metrics)
        last, prefix = self._last[point], hook.name + "/"
        for name, value in kept.items():
            last[prefix + name] = self._newest[prefix + name] = value
        if len(self._newest) > self._names:
            self._names = len(self._newest)
            self._tell_of_undescribed(hook, kept)

    def _tell_of_undescribed(self, hook: TrainingHook, metrics: Metrics) -> None:
        """Tell once of a hook that returns what it does not describe; where it describes nothing, that is meant."""
        infos = [info for name, info in self._infos.items() if name.startswith(hook.name + "/")]
        stray = [name for name in metrics if not any(info.describes(name) for info in infos)]
        if infos and stray and hook.name not in self._told:
            self._told.add(hook.name)
            near, row = nearest(stray[0], [info.column for info in infos]), f"{stray[0]} | formula | range | reading"
            sentence = f"Hook {hook.name!r} returns a metric {stray[0]!r} that it does not describe.{near}"
            of = f"metrics in class {type(hook).__name__}"
            warnings.warn(f"{sentence} Add to {of} a row: {row}", RunNotice, stacklevel=2)

    def deliver(self, point: HookPoint, epoch: int, step: int) -> None:
        """Bring the metrics of an epoch-level fire to the host and emit them together."""
        merged: dict[str, Any] = {}
        arrived = self._now.to_host()
        for report, values in arrived:
            merged |= {f"{report.hook.name}/{name}": value for name, value in values.items()}
        if merged:
            self._last[point] |= merged
            self._newest |= merged
            self._emit(merged, epoch, point, step)
        self._show(arrived, epoch)

    def flush_steps(self, epoch: int) -> None:
        """Bring the buffered step metrics, if there are any, to the host and emit them as series, for each point."""
        if self._steps:
            with self._isolation.visit():
                self._flush_steps(epoch)

    def _flush_steps(self, epoch: int) -> None:
        by_point: dict[HookPoint, dict[str, Series]] = {}
        last_step = 0
        arrived = self._steps.to_host()
        for report, values in arrived:
            table = by_point.setdefault(report.point, {})
            last_step = max(last_step, report.step)
            for name, value in values.items():
                series = table.setdefault(f"{report.hook.name}/{name}", Series([], []))
                series.steps.append(report.step)
                series.values.append(value)
        for point in sorted(by_point):
            self._emit(by_point[point], epoch, point, last_step)
        self._show(arrived, epoch)

    def _show(self, arrived: list[tuple[Report, dict[str, Any]]], epoch: int) -> None:
        """Let every hook look at its values, all of a delivery in one call, once these are safe in the sinks."""
        checking: dict[TrainingHook, list[tuple[int, dict[str, Any]]]] = {}
        for report, values in arrived:
            if type(report.hook).check is not TrainingHook.check:
                checking.setdefault(report.hook, []).append((report.step, values))
        for hook, rows in checking.items():
            self._run_hook(hook, "check", rows[-1][0], partial(_check, hook, rows, epoch, self._alerts))
            self._tell_alerts()

    def _tell_alerts(self) -> None:
        alerts, self._alerts = self._alerts, []
        for alert in alerts:
            if alert.step and (rows := self._rows_of(alert.step)) is not None:
                alert.rows = rows[:MOST_ROWS].tolist()
        if alerts:
            self._each(alerts[-1].step or 0, lambda sink: sink.alert(alerts))

    @property
    def waits(self) -> bool:
        """Whether a sink would miss metrics if the run broke off here."""
        return bool(self._sinks and self._steps)

    def state_dict(self) -> dict[str, Any]:
        """Return the metrics that wait for a flush, as host values, and the newest ones."""
        waiting = [
            [report.hook.name, report.point.name, report.step, values] for report, values in self._steps.on_host()
        ]
        return {"waiting": waiting, "last": list(self._last), "newest": self._newest}

    def load_state_dict(self, state: Mapping[str, Any], hooks: Mapping[str, TrainingHook]) -> None:
        """Resume from what :meth:`state_dict` returned, without what waits of hooks that are no longer there."""
        for name, point, step, values in state["waiting"]:
            if name in hooks:
                self._steps.add(Report(hooks[name], HookPoint[point], step), values)
        self._last = [dict(metrics) for _, metrics in zip(HookPoint, state["last"], strict=True)]
        self._newest = dict(state["newest"])
        self._names = len(self._newest)

    # Sinks

    def start(
        self, run: RunInfo, positions: Positions | None = None, *, fatal: tuple[type[Exception], ...] = (UsageError,)
    ) -> None:
        """Announce a strategy to the sinks; with the ``positions`` of a checkpoint, let each go on at its own.

        A sink that the checkpoint does not know begins anew; one that had failed before it stays off; the files of
        one that is off now are named. Raises what is ``fatal``, such as the :class:`UsageError` of a sink whose earlier
        files are no longer there.
        """
        known, self._infos = positions or {}, run.metric_infos
        self._tell_of_those_off(run, known)
        for sink in list(self._sinks):
            if _known(sink, known)[:1] == [None]:
                self._switch_off(sink)
                sentence = f"Sink {sink.name!r} had failed before the checkpoint, and stays off."
                warnings.warn(sentence, RunNotice, stacklevel=2)

        def begin(sink: MetricSink) -> None:
            found = _known(sink, known)
            if found and found[0] is not None:
                sink.resume(run, found[0])
            else:
                sink.set_run_context(run)

        with self._isolation.visit():
            self._each(0, begin, fatal=fatal)
            if known:  # none was refused: what follows the checkpoint goes now
                self._each(0, lambda sink: sink.flush())
        self._started = True

    def _tell_of_those_off(self, run: RunInfo, known: Positions) -> None:
        """Name the files that the checkpoint knows and that no sink goes on in: what follows it stays in them."""
        going_on = {name for sink in self._sinks for name in sink.leaves(run.strategy)}
        off = [entry for entry in SinkRegistry if known.get(entry.name) is not None]
        for name in dict.fromkeys(name for entry in off for name in entry.leaves(run.strategy)):
            if name not in going_on and (run.output_dir / name).exists():
                sentence = f"No sink goes on in {run.output_dir / name}, as one did before: it stays as it is."
                warnings.warn(sentence, RunNotice, stacklevel=3)

    def positions(self) -> dict[str, Position | None]:
        """Return how far the sinks have come, by their names and those they include; ``None`` for one that failed."""
        if self._at_end is not None:
            return self._at_end
        found: dict[str, Position | None] = {}
        self._each(0, lambda sink: found.update(dict.fromkeys(_names(sink), sink.position())))
        return {name: None for sink in self._failed for name in _names(sink)} | found

    def files(self) -> list[Path]:
        """Return the files that are to be on the disk before a checkpoint with the :meth:`positions` counts."""
        found: list[Path] = []
        if self._at_end is None:
            self._each(0, lambda sink: found.extend(sink.files()))
        return found

    def end(self, status: str) -> None:
        """Close the sinks."""
        self._tell_alerts()  # of a hook that raised after it had warned
        if self._started:  # the files of a run that could not go on are left as they are
            self._each(0, lambda sink: sink.flush())
        # A closed sink cannot tell its position, which is still asked for after the end.
        self._at_end = self.positions() if self._started else {}
        self._each(0, lambda sink: sink.close(status))

    def snapshot(self, epoch: int, step: int) -> None:
        """Tell the sinks that SNAPSHOT has fired, whether or not a hook listened there."""
        # A visit takes the baseline of every check, which would be in vain where no sink listens.
        if self._follow_snapshots:
            with self._isolation.visit():
                self._each(step, lambda sink: sink.snapshot(epoch, step))

    def _emit(self, metrics: Mapping[str, Any], epoch: int, point: HookPoint, step: int) -> None:
        self._each(step, lambda sink: sink.emit(metrics, epoch, point, step=step))

    def _each(
        self, step: int, action: Callable[[MetricSink], None], *, fatal: tuple[type[Exception], ...] = ()
    ) -> None:
        """Let every sink act; one that fails is dropped with a warning, since losing a metric must not stop a run.

        A changed training state is raised, and what else is ``fatal``.
        """
        passing: tuple[type[BaseException], ...] = (StateMutationError, KeyboardInterrupt, *fatal)
        for sink in list(self._sinks):
            try:
                self._isolation.observe(Call(sink.name, "an emit", step, "Sink"), partial(action, sink))
            except passing:
                raise
            except BaseException as error:  # sys.exit() among them, which would end the run as if it were done
                self._switch_off(sink)
                self._close_failed(sink, step)
                warnings.warn(
                    f"Sink {sink.name!r} failed and is switched off for the rest of the run: "
                    f"{type(error).__name__}: {error}",
                    stacklevel=2,
                )

    def _switch_off(self, sink: MetricSink) -> None:
        self._sinks.remove(sink)
        self._failed.append(sink)

    def _close_failed(self, sink: MetricSink, step: int) -> None:
        """Let a failed sink release its files; that it may fail at this too is known."""
        try:
            self._isolation.observe(Call(sink.name, "its end", step, "Sink"), partial(sink.close, "failed"))
        except (StateMutationError, KeyboardInterrupt):
            raise
        except BaseException:
            pass


def _names(sink: MetricSink) -> Sequence[str]:
    """Return the names under which a sink's position is kept: another sink may go on in the files that it includes."""
    return (sink.name, *sink.includes)


def _known(sink: MetricSink, positions: Positions) -> list[Position | None]:
    """Return the positions that a sink can go on at, the best one first."""
    return [positions[name] for name in _names(sink) if name in positions]


def _check(hook: TrainingHook, rows: list[tuple[int, dict[str, Any]]], epoch: int, alerts: list[Alert]) -> None:
    for step, values in rows:
        with alerts_caught(hook.name, epoch, step, alerts):
            hook.check(values, step)
