"""The rows of a step's batch, as a hook measured them, with what they are."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Describe = Callable[[int], Any]
"""What an experiment says of a row of its data set, for people."""


@dataclass(frozen=True)
class ExplainedRow:
    """A row of the batch of the step in question."""

    index: int | None
    """In the data set, where that is known."""
    place: int
    """In the batch."""
    loss: float
    gradient_norm: float
    stands_out: bool = False
    description: Any = None

    @property
    def name(self) -> str:
        """What a sentence calls it."""
        return f"row {self.index:,}" if self.index is not None else f"the row at place {self.place}"


def measured_rows(
    measured: Mapping[str, Sequence[float]], describe: Describe, standing_out: Sequence[int] = ()
) -> list[ExplainedRow]:
    """Return the rows of which ``loss`` and ``gradient_norm`` were measured, in the order of the batch.

    ``index`` may be among what was measured; ``standing_out`` are places.
    """
    losses, norms = measured["loss"], measured["gradient_norm"]
    indices = [int(index) for index in measured["index"]] if "index" in measured else [None] * len(losses)
    said = [None if index is None else described(describe, index) for index in indices]
    return [
        ExplainedRow(index, place, loss, norm, place in standing_out, text)
        for place, (index, loss, norm, text) in enumerate(zip(indices, losses, norms, said, strict=True))
    ]


def rows_by_step(points: Sequence[Any], hook: str, describe: Describe) -> dict[int, list[ExplainedRow]]:
    """Return the rows that ``batch_rows`` recorded, by step."""
    found: dict[int, dict[str, Any]] = {}
    for _, step, _, metric, value in points:
        name = metric.removeprefix(f"{hook}/")
        if name != metric and isinstance(value, list):
            found.setdefault(step, {})[name] = value
    return {step: measured_rows(measured, describe) for step, measured in found.items()}


def described(describe: Describe, index: int) -> Any:
    """Return what an experiment says of a row, as plain values; its own error where it cannot."""
    try:
        found = describe(index)
    except Exception as error:
        return f"describe_row({index}) failed: {type(error).__name__}: {error}"
    return f"a tensor of shape {tuple(found.shape)}" if isinstance(found, torch.Tensor) else found
