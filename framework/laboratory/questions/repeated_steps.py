"""Steps of a recorded run that are trained again with one hook, and the values that the hook records."""

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...runs import Stretch

TrainAgain = Callable[[Stretch, str, Mapping[str, Any]], Path]
"""Trains a stretch of the run again with one hook and its options, and returns the folder of its measurements."""


def recorded_values(points: Sequence[Any], hook: str, steps: Collection[int]) -> dict[str, Any]:
    """Return the values that a hook recorded at some steps: by metric, or by metric and branch."""
    values: dict[str, Any] = {}
    for _, recorded_step, _, metric, value in points:
        name, *path = metric.split("/", 2)
        if name == hook and recorded_step in steps:
            if len(path) == 1:
                values[path[0]] = value
            else:
                values.setdefault(path[0], {})[path[1]] = value
    return values
