"""The numbers by which the graph of a loss multiplies and divides."""

from typing import Any

from torch import Tensor

MOST_NODES = 80
"""Nodes of the graph that are read, from the loss on."""


def divisors_of(root: Tensor) -> set[float]:
    """Return the numbers by which the calls before a loss divide, or by whose inverse they multiply."""
    divisors = set[float]()
    nodes: list[Any] = [root.grad_fn]
    for node in nodes:  # the loop appends to this list
        name = "" if node is None else node.name()
        if name in ("DivBackward0", "MulBackward0"):
            numbers = [getattr(node, part, None) for part in ("_saved_self", "_saved_other")]
            values = [float(item) for item in numbers if isinstance(item, Tensor) and not item.ndim]
            divisors |= {item if name == "DivBackward0" else 1 / item for item in values if item}
        if node is not None and len(nodes) < MOST_NODES:
            nodes += [item for item, _ in node.next_functions if item is not None and item not in nodes]
    return divisors
