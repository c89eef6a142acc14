"""Delivery of metrics from hooks to sinks: buffering, one transfer to the host, full names, failed sinks."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from operator import methodcaller
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from ..errors import RunNotice, StateMutationError, UsageError, nearest, warn, warn_at
from ..hooks import (
    STEP_POINTS,
    Alert,
    HookPoint,
    MetricInfo,
    Metrics,
    MetricSink,
    MetricValue,
    RunInfo,
    Series,
    SinkRegistry,
    TrainingHook,
)
from ..isolation import Call, Isolation, is_shipped
from .log import log
from .urgent_flags import UrgentFlags

Group = tuple[torch.device, torch.dtype]
FEW = 8
"""Metrics of one call up to which tensors in host memory are read one by one."""
Origin = TypeVar("Origin")


class QueueLength(NamedTuple):
    """A length of a queue of metrics: the number of its calls, and of its vectors by device and dtype."""

    entries: int
    vectors: dict[Group, int]


class PendingMetrics(Generic[Origin]):
    """A queue of metrics whose tensors stay on their devices, as copies that later changes do not affect.

    ``add`` copies the tensors of one hook call into one small vector per device and dtype. ``drain_to_host`` joins the
    vectors of all calls and moves them to the host in one transfer per device, for all dtypes together.
    """

    def __init__(self) -> None:
        self._entries: list[tuple[Origin, Metrics, list[Group]]] = []
        self._packed: dict[Group, list[Tensor]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, origin: Origin, metrics: Metrics) -> Mapping[str, Any]:
        """Queue the metrics of one hook call, identified by its ``origin``, and return them with copied tensors.

        Few tensors in host memory are returned as pairs of their number and dtype, for :func:`_with_tensors`.

        Raises:
            ValueError: a tensor is not zero-dimensional.
            TypeError: ``metrics`` is not a mapping from strings to metric values.
        """
        if type(metrics) is not dict or {*map(type, metrics)} != {str}:
            _require_names(metrics)
        leaves: list[Tensor] = []
        copied: dict[str, MetricValue] = {}
        pairs: dict[str, Any] = {}
        is_flat, are_few = True, len(metrics) <= FEW
        for name, value in metrics.items():
            kind = type(value)
            if kind is Tensor and not value.ndim and value.dtype.is_floating_point and not value.is_meta:
                # A copy would take three operations on tensors, and each takes 2 to 8 µs after a step.
                if are_few and value.is_cpu:
                    number = value.item()
                    pairs[name], value = (number, value.dtype), number
                else:
                    leaves.append(value)
            elif kind is not float:
                value, is_flat = _copied_value(value, leaves, name), False
            copied[name] = value
        if not leaves:
            self._entries.append((origin, copied, []))
            return copied | pairs if pairs else copied
        keys, copies = self._copy(leaves)
        self._entries.append((origin, copied, keys))
        if not is_flat:
            return _substituted(copied, keys, copies) | pairs
        # The most frequent metrics, numbers and tensors without containers, are replaced without further calls.
        result: dict[str, Any] = {}
        remaining_keys = iter(keys)
        for name, value in copied.items():
            result[name] = value if type(value) is float else next(copies[next(remaining_keys)])
        return result | pairs

    def _copy(self, leaves: list[Tensor]) -> tuple[list[Group], dict[Group, Iterator[Tensor]]]:
        """Queue copies of tensors; return the group of each, and the copies of each group."""
        keys: list[Group] = []
        groups: dict[Group, list[Tensor]] = {}
        for leaf in leaves:
            keys.append((leaf.device, leaf.dtype))
            groups.setdefault(keys[-1], []).append(leaf)
        copies: dict[Group, Iterator[Tensor]] = {}
        for key, group in groups.items():
            vector = torch.stack(group).detach()
            self._packed.setdefault(key, []).append(vector)
            copies[key] = iter(vector.unbind())
        return keys, copies

    def mark(self) -> "QueueLength":
        """Return the current length of the queue, for :meth:`truncate`."""
        return QueueLength(len(self._entries), {key: len(vectors) for key, vectors in self._packed.items()})

    def truncate(self, mark: "QueueLength") -> None:
        """Drop what was queued after ``mark``."""
        del self._entries[mark.entries :]
        for key, vectors in self._packed.items():
            del vectors[mark.vectors.get(key, 0) :]
        self._packed = {key: vectors for key, vectors in self._packed.items() if vectors}

    def host_values(self) -> list[tuple[Origin, dict[str, Any]]]:
        """Return the origin and the host values of every queued call, in order."""
        numbers = _host_numbers({key: torch.cat(vectors) for key, vectors in self._packed.items()})
        return [(origin, _substituted(metrics, keys, numbers)) for origin, metrics, keys in self._entries]

    def drain_to_host(self) -> list[tuple[Origin, dict[str, Any]]]:
        """Return the result of :meth:`host_values` and clear the queue."""
        host = self.host_values()
        self._entries.clear()
        self._packed.clear()
        return host


def _host_numbers(vectors: Mapping[Group, Tensor]) -> dict[Group, Iterator[Any]]:
    """Return the exact numbers of each vector, after one transfer per device.

    Vectors of several dtypes are transferred as bytes, the widest dtype first, so that every vector is aligned.
    """
    by_device: dict[torch.device, list[Group]] = {}
    for group in sorted(vectors, key=lambda group: group[1].itemsize, reverse=True):
        by_device.setdefault(group[0], []).append(group)
    numbers: dict[Group, Iterator[Any]] = {}
    for groups in by_device.values():
        if len(groups) == 1:
            numbers[groups[0]] = iter(vectors[groups[0]].tolist())
            continue
        raw = torch.cat([vectors[group].view(torch.uint8) for group in groups]).cpu()
        parts = raw.split_with_sizes([vectors[group].nbytes for group in groups])
        numbers |= {group: iter(part.view(group[1]).tolist()) for group, part in zip(groups, parts, strict=True)}
    return numbers


def _substituted(metrics: Metrics, keys: list[Group], values: Mapping[Group, Iterator[Any]]) -> dict[str, Any]:
    """Return the metrics with each tensor replaced by the next value of its group."""
    if not keys:
        return dict(metrics)
    replacements = iter([next(values[key]) for key in keys])
    return {name: _with_numbers(value, replacements) for name, value in metrics.items()}


def _with_tensors(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return metrics with tensors in place of pairs of a number and its dtype."""
    return {
        name: torch.tensor(value[0], dtype=value[1], device="cpu") if type(value) is tuple else value
        for name, value in metrics.items()
    }


def _require_names(metrics: object) -> None:
    """Raise ``TypeError`` unless ``metrics`` is a mapping whose keys are strings."""
    if not isinstance(metrics, Mapping):
        kind = "None" if metrics is None else f"a {type(metrics).__name__}"
        raise TypeError(f"returned {kind}; a hook returns a dict of metrics, {{}} if it has none")
    if invalid := [name for name in metrics if not isinstance(name, str)]:
        raise TypeError(f"returned a metric under the name {invalid[0]!r}; names of metrics are strings")


def _copied_value(value: MetricValue, leaves: list[Tensor], name: object) -> MetricValue:
    """Copy the containers of a metric value, which its hook may reuse, and append its tensors to ``leaves``.

    NumPy scalars and zero-dimensional arrays become Python numbers.
    """
    if isinstance(value, (Tensor, np.ndarray)) and value.ndim:
        kind, shape = "a tensor" if isinstance(value, Tensor) else "an array", tuple(value.shape)
        remedy = "metrics are zero-dimensional tensors: return its mean or norm, or .tolist()"
        raise ValueError(f"returned {kind} of shape {shape} as {name!r}; {remedy}")
    if isinstance(value, Tensor) and not (value.is_complex() or value.is_meta):
        leaves.append(value)
        return value
    if isinstance(value, (np.generic, np.ndarray)):
        value = float(value) if isinstance(value, np.floating) else value.item()
    if isinstance(value, Mapping):
        copied = {_plain_key(key): _copied_value(item, leaves, key) for key, item in value.items()}
        if len({*map(str, copied)}) < len(value):
            keys = ", ".join(map(repr, value))
            raise ValueError(f"returned a dict with the keys {keys} as {name!r}; sinks write keys as equal texts")
        return copied
    if isinstance(value, (list, tuple)):
        return [_copied_value(item, leaves, name) for item in value]
    if not isinstance(value, (int, float)):
        kind = f"tensor of {value.dtype} on {value.device}" if isinstance(value, Tensor) else type(value).__name__
        remedy = "a metric is a float, int, bool or zero-dimensional tensor, or a list or dict of these"
        raise TypeError(f"returned a {kind} as a metric; {remedy}; its name is {name!r}")
    return value


def _plain_key(key: object) -> object:
    if isinstance(key, np.generic):
        key = key.item()
    if not isinstance(key, (str, int, float)):
        raise TypeError(f"returned a dict with the key {key!r} as a metric; such keys are strings or numbers")
    return key


def _with_numbers(value: MetricValue, numbers: Iterator[Any]) -> Any:
    """Return ``value`` with its tensors replaced, in order, by the next items of ``numbers``."""
    if isinstance(value, Tensor):
        return next(numbers)
    if isinstance(value, Mapping):
        return {key: _with_numbers(item, numbers) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_with_numbers(item, numbers) for item in value]
    return value


RowsOf = Callable[[int], Tensor | None]
"""Returns the row numbers of a step, or ``None`` if they are unknown."""
MOST_ROWS = 1024
"""The largest number of rows in an alert."""


MetricOrigin = tuple[TrainingHook, HookPoint, int]
"""The origin of a set of metrics: hook, point and step. A plain tuple, since one is created for every call."""


def unknown_rows(step: int) -> Tensor | None:
    """Return ``None``: a loop without row numbers."""


Position = Mapping[str, Any]
Positions = Mapping[str, Position | None]


class MetricDelivery:
    """Buffers metrics; delivers them after epoch-level points, and those of steps in :meth:`flush_steps`."""

    def __init__(
        self,
        isolation: Isolation,
        sinks: Sequence[MetricSink],
        run_hook: Callable[..., Any],
        rows_of: RowsOf = unknown_rows,
    ) -> None:
        """Prepare the delivery; ``run_hook(hook, where, step, function)`` calls hook code through the isolation."""
        self._rows_of = rows_of
        self._isolation = isolation
        self._sinks = _one_writer_per_file(sinks)
        self._failed: list[MetricSink] = []
        self.sink_errors: list[dict[str, Any]] = []
        """Sinks that failed, each with the step and the error."""
        self._run_hook = run_hook
        self._pending: PendingMetrics[MetricOrigin] = PendingMetrics()
        self.pending_steps: PendingMetrics[MetricOrigin] = PendingMetrics()
        """The metrics of steps, until the next delivery."""
        self._started = False
        self._infos: Mapping[str, MetricInfo] = {}
        # The number of metric names whose descriptions have been checked.
        self._checked_count, self._hooks_with_warning = 0, set[str]()
        self._final_positions: dict[str, Position | None] | None = None
        self._last: list[dict[str, Any]] = [{} for _ in HookPoint]
        self._newest: dict[str, Any] = {}
        self._alerts: list[Alert] = []
        """Alerts that have not been sent to the sinks."""
        self.urgent = UrgentFlags()
        """The results of ``is_urgent`` of the hooks, which ask for the immediate delivery of step metrics."""
        self._follow_snapshots = any(type(sink).snapshot is not MetricSink.snapshot for sink in sinks)

    def include(self, sink: MetricSink) -> None:
        """Add a sink that writes no files, before :meth:`start`."""
        self._sinks.append(sink)

    def pending(self) -> list[tuple[int, dict[str, Any]]]:
        """Return the buffered step metrics as host values by full name, each with their step; they stay buffered."""
        waiting = self.pending_steps.host_values()
        return [
            (step, {f"{hook.name}/{name}": value for name, value in values.items()})
            for (hook, _, step), values in waiting
        ]

    def last(self, point: HookPoint | None = None) -> dict[str, Any]:
        """Return the newest metrics of one point, or of all points, by full name."""
        return _with_tensors(self._newest if point is None else self._last[point])

    def add(self, hook: TrainingHook, point: HookPoint, step: int, metrics: Metrics) -> None:
        """Buffer the metrics of one hook call."""
        if isinstance(metrics, dict) and not metrics:
            return
        pending = self.pending_steps if point in STEP_POINTS else self._pending
        copies = pending.add((hook, point, step), metrics)
        last, prefix = self._last[point], hook.name + "/"
        for name, value in copies.items():
            last[prefix + name] = self._newest[prefix + name] = value
        if len(self._newest) > self._checked_count:
            self._checked_count = len(self._newest)
            self._warn_about_undescribed(hook, copies)

    def _warn_about_undescribed(self, hook: TrainingHook, metrics: Metrics) -> None:
        """Warn once about undescribed metrics of a hook; a hook without any description is not checked."""
        infos = [info for name, info in self._infos.items() if name.startswith(hook.name + "/")]
        undescribed = [name for name in metrics if not any(info.describes(name) for info in infos)]
        if infos and undescribed and hook.name not in self._hooks_with_warning:
            self._hooks_with_warning.add(hook.name)
            name, suggestion = undescribed[0], nearest(undescribed[0], [info.column for info in infos])
            sentence = f"Hook {hook.name!r} returns a metric {name!r} that it does not describe.{suggestion}"
            advice = f"Add a row to metrics in class {type(hook).__name__}: {name} | formula | range | reading"
            warn(f"{sentence} {advice}", RunNotice, stacklevel=2)

    def deliver(self, point: HookPoint, epoch: int, step: int) -> None:
        """Transfer the metrics of an epoch-level point to the host and emit them together."""
        merged: dict[str, Any] = {}
        arrived = self._pending.drain_to_host()
        for (hook, _, _), values in arrived:
            merged |= {f"{hook.name}/{name}": value for name, value in values.items()}
        if merged:
            self._last[point] |= merged
            self._newest |= merged
            self._emit(merged, epoch, point, step)
        self._run_checks(arrived, epoch)

    def flush_steps(self, epoch: int) -> None:
        """Transfer the buffered step metrics, if any, to the host and emit them as series, point by point."""
        if self.pending_steps:
            with self._isolation.visit():
                self._flush_steps(epoch)

    def deliver_urgent(self, epoch: int) -> bool:
        """Deliver the buffered step metrics, within a visit, if a hook has asked for it, and return whether one has."""
        is_urgent = self.urgent.take()
        if is_urgent:
            self._flush_steps(epoch)
        return is_urgent

    def _flush_steps(self, epoch: int) -> None:
        self.urgent.clear()
        by_point: dict[HookPoint, dict[str, Series]] = {}
        last_step = 0
        arrived = self.pending_steps.drain_to_host()
        for (hook, point, step), values in arrived:
            table = by_point.setdefault(point, {})
            last_step = max(last_step, step)
            for name, value in values.items():
                series = table.setdefault(f"{hook.name}/{name}", Series([], []))
                series.steps.append(step)
                series.values.append(value)
        for point in sorted(by_point):
            self._emit(by_point[point], epoch, point, last_step)
        self._run_checks(arrived, epoch)

    def _run_checks(self, arrived: list[tuple[MetricOrigin, dict[str, Any]]], epoch: int) -> None:
        """Call ``check`` of every hook for its delivered values, in one isolated call, after the sinks have them."""
        rows_by_hook: dict[TrainingHook, list[tuple[int, dict[str, Any]]]] = {}
        for (hook, _, step), values in arrived:
            if type(hook).check is not TrainingHook.check:
                rows_by_hook.setdefault(hook, []).append((step, values))
        for hook, rows in rows_by_hook.items():
            self._run_hook(hook, "check", rows[-1][0], partial(_check, hook, rows, epoch, self._alerts))
            self._send_alerts()

    def _send_alerts(self) -> None:
        alerts, self._alerts = self._alerts, []
        for alert in alerts:
            if alert.step and (rows := self._rows_of(alert.step)) is not None:
                alert.rows = rows[:MOST_ROWS].tolist()
        for alert in alerts:
            level = logging.INFO if alert.severity == "info" else logging.WARNING
            log(self._isolation.streams, level, "Alert of %s at step %s: %s", alert.hook, alert.step, alert)
        if alerts:
            self._for_each_sink(alerts[-1].step or 0, methodcaller("alert", alerts))

    def report(self, alert: Alert, source: str, epoch: int) -> None:
        """Send an alert about the loop itself with the next delivery; ``source`` stands in place of a hook's name."""
        alert.hook, alert.epoch = source, epoch
        self._alerts.append(alert)

    @property
    def has_pending(self) -> bool:
        """Whether metrics would be lost if the run stopped now."""
        return bool(self._sinks and self.pending_steps)

    def state_dict(self) -> dict[str, Any]:
        """Return the buffered metrics, as host values, and the newest ones."""
        pending = self.pending_steps.host_values()
        waiting = [[hook.name, point.name, step, values] for (hook, point, step), values in pending]
        last, newest = [*map(_with_tensors, self._last)], _with_tensors(self._newest)
        return {"waiting": waiting, "last": last, "newest": newest}

    def load_state_dict(self, state: Mapping[str, Any], hooks: Mapping[str, TrainingHook]) -> None:
        """Restore a state of :meth:`state_dict`, without buffered metrics of hooks that are no longer active."""
        for name, point, step, values in state["waiting"]:
            if name in hooks:
                self.pending_steps.add((hooks[name], HookPoint[point], step), values)
        self._last = [dict(metrics) for _, metrics in zip(HookPoint, state["last"], strict=True)]
        self._newest = dict(state["newest"])
        self._checked_count = len(self._newest)

    # Sinks

    def start(
        self, run: RunInfo, positions: Positions | None = None, *, fatal: tuple[type[Exception], ...] = (UsageError,)
    ) -> None:
        """Start the sinks, or resume them at the ``positions`` of a checkpoint.

        A sink without a position starts from scratch, and one that had failed before the checkpoint is not started.
        A warning names the files of earlier sinks that are not active now.

        Raises:
            Exception: any ``fatal`` error, such as the :class:`UsageError` of a sink whose earlier files are missing.
        """
        earlier_positions, self._infos = positions or {}, run.metric_infos
        self._warn_about_missing_sinks(run, earlier_positions)
        for sink in list(self._sinks):
            if _stored_positions(sink, earlier_positions)[:1] == [None]:
                self._disable(sink)
                sentence = f"Sink {sink.name!r} had failed before the checkpoint and stays disabled."
                self.sink_errors.append({"sink": sink.name, "step": 0, "error": sentence, "lost_rows": sink.keeps})
                warn(sentence, RunNotice, stacklevel=2)

        def start_sink(sink: MetricSink) -> None:
            stored = _stored_positions(sink, earlier_positions)
            if stored and stored[0] is not None:
                sink.resume(run, stored[0])
            else:
                sink.set_run_context(run)

        with self._isolation.visit():
            self._for_each_sink(0, start_sink, fatal=fatal)
            if earlier_positions:  # all sinks have accepted their position, so rows after the checkpoint can be removed
                self._for_each_sink(0, methodcaller("flush"))
        self._started = True

    def _warn_about_missing_sinks(self, run: RunInfo, positions: Positions) -> None:
        """Warn about files of earlier sinks that no active sink continues; their rows after the checkpoint remain."""
        continued_files = {name for sink in self._sinks for name in sink.file_names(run.strategy)}
        earlier_sinks = [entry for entry in SinkRegistry if positions.get(entry.name) is not None]
        for name in dict.fromkeys(name for entry in earlier_sinks for name in entry.file_names(run.strategy)):
            if name not in continued_files and (run.output_dir / name).exists():
                sentence = f"No active sink continues {run.output_dir / name}; the file is left unchanged."
                warn(sentence, RunNotice, stacklevel=3)

    def positions(self) -> dict[str, Position | None]:
        """Return the positions of the sinks by name and included names; ``None`` for a failed sink."""
        if self._final_positions is not None:
            return self._final_positions
        positions: dict[str, Position | None] = {}

        def add_position(sink: MetricSink) -> None:
            positions.update(dict.fromkeys(_names(sink), sink.position()))

        self._for_each_sink(0, add_position)
        return {name: None for sink in self._failed for name in _names(sink)} | positions

    def files(self) -> list[Path]:
        """Return the files that must be on the disk before a checkpoint with these :meth:`positions` is valid."""
        files: list[Path] = []
        if self._final_positions is None:
            self._for_each_sink(0, lambda sink: files.extend(sink.files()))
        return files

    def end(self, status: str) -> None:
        """Close the sinks."""
        self._send_alerts()  # alerts of a hook that raised after them
        if self._started:  # the files of a run that could not be resumed stay unchanged
            self._for_each_sink(0, methodcaller("flush"))
        # A closed sink has no position, but positions are requested after the end, too.
        self._final_positions = self.positions() if self._started else {}
        self._for_each_sink(0, methodcaller("close", status))

    def snapshot(self, epoch: int, step: int) -> None:
        """Notify the sinks of SNAPSHOT, even if no hook fires there."""
        # A visit takes the baseline of every check, which is wasted if no sink needs the notification.
        if self._follow_snapshots:
            with self._isolation.visit():
                self._for_each_sink(step, methodcaller("snapshot", epoch, step))

    def _emit(self, metrics: Mapping[str, Any], epoch: int, point: HookPoint, step: int) -> None:
        self._for_each_sink(step, methodcaller("emit", metrics, epoch, point, step=step))

    def _for_each_sink(
        self, step: int, action: Callable[[MetricSink], None], *, fatal: tuple[type[Exception], ...] = ()
    ) -> None:
        """Run ``action`` on every sink; a failed sink is disabled with a warning, since it must not stop the run.

        Raises ``fatal`` errors, and :class:`StateMutationError` if the sink changed the training state.
        """
        raised_errors: tuple[type[BaseException], ...] = (StateMutationError, KeyboardInterrupt, *fatal)
        for sink in list(self._sinks):
            try:
                # "an emit" also seeds the random stream of the call.
                is_ours = is_shipped(type(sink))
                call = Call(sink.name, "an emit", step, "Sink", is_ours, sink.draws or not is_ours)
                self._isolation.observe(call, partial(action, sink))
            except raised_errors:
                raise
            except BaseException as error:  # includes SystemExit, which would end the run as if it had completed
                self._disable(sink)
                self._close_failed(sink, step)
                text = f"{type(error).__name__}: {error}"
                self.sink_errors.append({"sink": sink.name, "step": step, "error": text, "lost_rows": sink.keeps})
                warn(f"Sink {sink.name!r} failed and is disabled for the rest of the run: {text}", stacklevel=2)

    def _disable(self, sink: MetricSink) -> None:
        self._sinks.remove(sink)
        self._failed.append(sink)

    def _close_failed(self, sink: MetricSink, step: int) -> None:
        """Close a failed sink, so that it releases its files; further errors are ignored."""
        try:
            self._isolation.observe(Call(sink.name, "its end", step, "Sink"), partial(sink.close, "failed"))
        except (StateMutationError, KeyboardInterrupt):
            raise
        except BaseException:
            pass


def _one_writer_per_file(sinks: Sequence[MetricSink]) -> list[MetricSink]:
    """Return the sinks without those whose files another one writes; of several such others, the first writes them."""
    included = {name for sink in sinks for name in sink.includes}
    writers: dict[str, MetricSink] = {}
    for sink in sinks:
        for name in sink.includes:
            if writers.setdefault(name, sink) is not sink:
                sink.share_files(writers[name])
    return [sink for sink in sinks if sink.name not in included]


def _names(sink: MetricSink) -> Sequence[str]:
    """Return the names under which a position is stored: another sink may continue the files that this one includes."""
    return (sink.name, *sink.includes)


def _stored_positions(sink: MetricSink, positions: Positions) -> list[Position | None]:
    """Return the stored positions at which a sink can resume, best one first."""
    return [positions[name] for name in _names(sink) if name in positions]


def _check(hook: TrainingHook, rows: list[tuple[int, dict[str, Any]]], epoch: int, alerts: list[Alert]) -> None:
    """Append the alerts of a hook about ``rows`` of step and values to ``alerts``, and issue them as warnings."""
    code = getattr(hook.check, "__code__", _check.__code__)
    for step, values in rows:
        begin = len(alerts)
        returned: Any = hook.check(values, step)
        if not isinstance(returned, Iterable | None):
            raise TypeError(f"returned {returned!r}; it returns a list of alerts, such as [Alert('The loss spiked.')]")
        for alert in returned or ():
            if not isinstance(alert, Alert):
                raise TypeError(f"returned {alert!r} in its alerts; each is an object like Alert('The loss spiked.')")
            alert.hook, alert.epoch = hook.name, epoch
            alert.step = step if alert.step is None else alert.step
            alerts.append(alert)
        # All alerts are recorded before the first warning, which raises if a filter makes alerts errors.
        for alert in alerts[begin:]:
            warn_at(alert.warning(), code.co_filename, code.co_firstlineno)
