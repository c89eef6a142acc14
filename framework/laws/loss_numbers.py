"""The last calls before a loss: the numbers by which they multiply and divide it, and what has computed its values."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..doctor.senses import saved_value
from .recorded_step import DIVISIONS, SCALINGS, RecordedStep, Value

SHAPES = {"View", "UnsafeView", "Squeeze", "Unsqueeze", "Transpose", "Permute", "Reshape", "Select", "Slice", "ToCopy"}
MOST_NODES = 80
"""Nodes of the graph that are read, from the loss on."""


def divisors_of(root: Tensor) -> set[float]:
    """Return the numbers by which the calls before a loss divide, or by whose inverse they multiply."""
    divisors = set[float]()
    nodes: list[Any] = [root.grad_fn]
    for node in nodes:  # the loop appends to this list
        name = "" if node is None else node.name()
        if name in ("DivBackward0", "MulBackward0"):
            numbers = [saved_value(node, part) for part in ("self", "other")]
            values = [float(item) for item in numbers if isinstance(item, Tensor) and not item.ndim]
            divisors |= {item if name == "DivBackward0" else 1 / item for item in values if item}
        if node is not None and len(nodes) < MOST_NODES:
            nodes += [item for item, _ in node.next_functions if item is not None and item not in nodes]
    return divisors


@dataclass(frozen=True)
class LossPath:
    """How a loss was multiplied and divided last."""

    origin: str
    """The name of the function whose result, perhaps multiplied by a number, is the loss; empty for the model."""
    divisions: tuple[float, ...]
    """The inverse of each number by which it was divided."""

    @classmethod
    def of(cls, step: RecordedStep) -> "LossPath":
        """Return the path of a step."""
        producers = {value: call for call in step.calls for value in call.results}
        call = producers.get(step.loss) if step.loss is not None else None
        divisions = []
        while call is not None and call.operation in SCALINGS:
            items = step.items_of(call)
            values = [item for item in items if isinstance(item, Value)]
            numbers = [step.number_of(item) for item in items if item not in values]
            if call.operation in DIVISIONS and any(numbers[:1]):
                divisions.append(1 / numbers[0])
            call = producers.get(values[0]) if len(values) == 1 else None
        return cls("" if call is None or call.is_pass else call.name, tuple(divisions))


def last_functions(values: Tensor) -> list[str]:
    """Return the names of the last two functions that have computed values, apart from changes of their shape."""
    names: list[str] = []
    node: Any = values.grad_fn
    while node is not None and len(names) < 2:
        name = node.name().removesuffix("0").removesuffix("Backward")
        if name not in SHAPES:
            names.append(name)
        node = next((item for item, _ in node.next_functions if item is not None), None)
    return names
