"""The diagnosis of a run for the page, from the values that the page has read."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from ..doctor import Curve, Diagnosis, diagnose
from ..runs import RunRecord, history_without_metrics

MOST_DIAGNOSED = 4096  # metrics, like in a history

Points = Mapping[str, tuple[Sequence[float], Sequence[float]]]


def diagnosis_of(
    folder: Path, run: RunRecord, points: Points, alerts: Iterable[Mapping[str, Any]], last_step: int
) -> Diagnosis:
    """Return the findings about a run, without reading its record again.

    Args:
        folder: the folder of the run.
        run: its settings.
        points: steps and values of each metric.
        alerts: the lines of its file of alerts.
        last_step: the step of the last emit.
    """
    history = history_without_metrics(folder, run)
    for name, (steps, values) in islice(points.items(), MOST_DIAGNOSED):
        history.curves[name] = Curve.of_points(steps, values)
    history.step = last_step
    for alert in alerts:
        history.add_alert(alert)
    return diagnose(history)
