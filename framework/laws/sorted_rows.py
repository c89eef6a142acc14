"""Running sums over rows that are sorted, as in losses of survival times."""

from math import prod

from torch import Tensor

from .recorded_step import RecordedCall, RecordedStep
from .trial import Trial

RUNNING = {"cumsum", "logcumsumexp", "cumprod", "cummax", "cummin"}
LEAST_VALUES = 3
"""Different values of a constant that shows by what rows are sorted."""


def adds_sorted_rows(trial: Trial) -> str:
    """Return the name of a running sum over rows that are sorted, as in the partial likelihood of survival times.

    Rows are sorted if a constant of the step with one value for each row is. Times are often no part of the loss: a
    running sum of exponentials of one output for each row counts as well, but not one of vectors, whose entries it
    takes for those of other rows.
    """
    running = [(call, shapes) for call, shapes in trial.shapes_of_calls if call.name in RUNNING]
    found = [
        call for call, shapes in running if shapes and shapes[0][:1] == (trial.rows,) and prod(shapes[0]) == trial.rows
    ]
    if not found or len(found) < len(running):
        return ""
    constants = [trial.step.constants[index] for index in trial.layout.layouts]
    is_sorted = any(_is_sorted(item.flatten()) for item in constants if item.numel() == trial.rows)
    return found[0].name if is_sorted or all(_is_of_exponentials(trial.step, call) for call in found) else ""


def _is_sorted(values: Tensor) -> bool:
    steps = values.double().diff()
    return bool((steps >= 0).all() or (steps <= 0).all()) and len(set(values.tolist())) >= LEAST_VALUES


def _is_of_exponentials(step: RecordedStep, call: RecordedCall) -> bool:
    """Return whether a running sum adds exponentials."""
    producers = {value: item for item in step.calls for value in item.results}
    before = [producers[item].name for item in step.items_of(call) if item in producers]
    return call.name == "logcumsumexp" or "exp" in before
