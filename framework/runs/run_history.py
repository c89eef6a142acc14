"""The history of a recorded run, read from its folder for a diagnosis."""

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..doctor import History, StepTimes
from ..durable_files import read_lines
from ..errors import UsageError, listed, warn
from ..hooks import ALERTS, alert_fields
from .records import RunRecord, read_left_out, read_status, read_summary
from .replay import Record, forward_emits, record_of


def read_history(folder: Path, until: int | None = None) -> History:
    """Return the history of the run in a folder; without a record of metrics it has only the start-up facts.

    Args:
        folder: the folder of a run.
        until: the last step to read; by default all.

    Raises:
        UsageError: if the folder has no run, or its record is damaged.
    """
    run = RunRecord.read(folder)
    history = history_without_metrics(folder, run)

    def take(emit: Record) -> None:
        if until is None or emit.step <= until:
            history.add(emit.step, emit.metrics, emit.epoch)

    try:
        sink, path = record_of(folder, run.strategy)
    except UsageError:  # a run without a sink that keeps metrics
        return history
    forward_emits(path, sink.read(path), take)
    for alert in read_alerts(folder):
        if until is None or alert["step"] <= until:
            history.add_alert(alert)
    return history


def history_without_metrics(folder: Path, run: RunRecord) -> History:
    """Return the start-up facts, the settings and the status of the run in a folder as a history."""
    history = History(run.facts, run.training or run.config, run.facts.get("planned_steps"), [*run.hooks])
    with suppress(UsageError):  # a summary that cannot be read
        history.status = read_status(folder) or "running"
        history.left_out = read_left_out(folder)
        history.step_times = read_step_times(folder)
    return history


def read_step_times(folder: Path) -> StepTimes | None:
    """Return the time of a step of the run in a folder; ``None`` before its end, and of a run without enough steps.

    Raises:
        UsageError: for a summary that cannot be read.
    """
    return StepTimes.of(read_summary(folder).get("step_time"))


def read_alerts(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the alerts and recoveries of the run in a folder, oldest first; warn of lines that are not alerts.

    Raises:
        UsageError: if the file of alerts cannot be read.
    """
    path = folder / ALERTS
    damaged = []
    for number, line in read_lines(path):
        try:
            alert = alert_fields(json.loads(line))
        except (ValueError, TypeError, AttributeError, RecursionError, UsageError):
            damaged.append(number)
        else:
            yield alert
    if damaged:
        warn(f"{path} is damaged: these lines are not alerts, and are left out: {listed(damaged)}.")
