"""Steps of a recorded run that are trained again with one hook: its values, and the rows of their batches."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ...report import inspect_run
from ...runs import StepRange
from ..explained_step import ExplainedRow

TrainAgain = Callable[[StepRange, str, Mapping[str, Any]], Path]
"""Trains a stretch of the run again with one hook and its options, and returns the folder of its measurements."""
Describe = Callable[[int], Any]
"""Returns an experiment's readable description of a row of its data set."""


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


def measured_rows(
    measured: Mapping[str, Sequence[float]], describe: Describe, outlier_places: Sequence[int] = ()
) -> list[ExplainedRow]:
    """Return the rows with their measured ``loss`` and ``gradient_norm``, in the order of the batch.

    ``measured`` may also contain ``index``; ``outlier_places`` are the positions of outlier rows in the batch.
    """
    losses, norms = measured["loss"], measured["gradient_norm"]
    indices = [int(index) for index in measured["index"]] if "index" in measured else [None] * len(losses)
    texts = [None if index is None else describe_safely(describe, index) for index in indices]
    return [
        ExplainedRow(index, place, loss, norm, place in outlier_places, text)
        for place, (index, loss, norm, text) in enumerate(zip(indices, losses, norms, texts, strict=True))
    ]


def rows_by_step(points: Sequence[Any], hook: str, describe: Describe) -> dict[int, list[ExplainedRow]]:
    """Return the rows that ``batch_rows`` recorded, by step."""
    by_step: dict[int, dict[str, Any]] = {}
    for step, name, value in recorded(points, hook):
        if isinstance(value, list):
            by_step.setdefault(step, {})[name] = value
    return {step: measured_rows(measured, describe) for step, measured in by_step.items()}


def describe_safely(describe: Describe, index: int) -> Any:
    """Return an experiment's description of a row, or the error that it raised."""
    try:
        description = describe(index)
    except Exception as error:
        return f"describe_row({index}) failed: {type(error).__name__}: {error}"
    return f"a tensor of shape {tuple(description.shape)}" if isinstance(description, torch.Tensor) else description
