"""Steps of a recorded run that are trained again with one hook, and the values that the hook records."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...report import inspect_run
from ...runs import StepRange

TrainAgain = Callable[[StepRange, str, Mapping[str, Any]], Path]
"""Trains a stretch of the run again with one hook and its options, and returns the folder of its measurements."""


def recorded(points: Sequence[Any], hook: str) -> Iterator[tuple[int, str, Any]]:
    """Yield the step, the name without that of the hook, and the value of each metric that a hook recorded."""
    for _, step, _, metric, value in points:
        name = metric.removeprefix(f"{hook}/")
        if name != metric:
            yield step, name, value


def measure(train_again: TrainAgain, stretch: StepRange, hook: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Train a stretch again, and return the values that the hook recorded: by metric, or by metric and branch."""
    points = inspect_run(train_again(stretch, hook, options)).points
    values: dict[str, Any] = {}
    for step, name, value in recorded(points, hook):
        metric, _, branch = name.partition("/")
        if branch and stretch.step <= step <= stretch.until:
            values.setdefault(metric, {})[branch] = value
        elif stretch.step <= step <= stretch.until:
            values[metric] = value
    return values
