"""Nodes of autograd's graph, read without running or changing anything.

This module alone depends on the attributes of torch's autograd nodes, which have no documented equivalent:

- ``name()`` and ``next_functions`` are public. The names of the nodes are those of torch's derivatives.yaml.
- ``_saved_<argument>`` is read of numbers only (``_saved_reduction``, ``_saved_dim``, ``_saved_ignore_index``). For a
  tensor it would call the unpack hooks of ``saved_tensors_hooks``, which run a checkpointed region again, and raise
  after the backward pass.
- ``_raw_saved_<argument>.data`` is the saved tensor itself; it is read only if no hook has packed it.
- ``_input_metadata`` has shape and dtype of a node's output, also when the tensor no longer exists.

Each attribute is read with a default, so that a version of torch without it gives fewer facts instead of an error.
"""

import math
import re
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor

VIEWS = frozenset(
    {"View", "UnsafeView", "ReshapeAlias", "Transpose", "Permute", "T", "Slice", "Select", "Index", "IndexSelect"}
    | {"Squeeze", "Unsqueeze", "Expand", "Clone", "ToCopy", "Alias", "AsStrided", "Narrow", "MaskedSelect"}
)
"""Nodes that only move or convert elements."""
MOST_NODES = 20_000
"""Nodes visited in the search for attention and embeddings."""


def operation_of(node: Any) -> str:
    """Return the name of an autograd node without its ending: ``NllLoss`` of ``NllLossBackward0``."""
    return _operation(node.name())


@cache
def _operation(name: str) -> str:
    return re.sub(r"Backward\d*$", "", name.rpartition("::")[2])


def inputs_of(node: Any) -> list[Any]:
    """Return the nodes of a node's differentiable inputs."""
    return [following for following, _ in node.next_functions if following is not None]


def all_nodes(root: Any, most: float = MOST_NODES) -> Iterator[Any]:
    """Yield the nodes of the graph, up to a limit."""
    waiting, seen = ([root], {root}) if root is not None else ([], set())
    while waiting:
        node = waiting.pop()
        yield node
        new = [item for item in inputs_of(node) if item not in seen]
        if len(seen) + len(new) > most:
            return
        seen.update(new)
        waiting += new


def walk(root: Any, follows: Callable[[Any], bool], most: int) -> Iterator[Any]:
    """Yield the nodes from this one on in breadth, up to a limit, and not behind those that are not to be followed."""
    waiting, seen = ([root], {root}) if root is not None else ([], set())
    for node in waiting:
        yield node
        new = [item for item in inputs_of(node) if item not in seen] if follows(node) else []
        waiting += new[: most - len(waiting)]
        seen.update(new)


def leaves_of(loss: Tensor) -> list[Tensor]:
    """Return the tensors whose gradients a backward pass from a loss would change."""
    variables = [getattr(node, "variable", None) for node in all_nodes(loss.grad_fn, math.inf)]
    return [item for item in variables if isinstance(item, Tensor)]  # only of nodes that accumulate a gradient


def output_of(node: Any) -> tuple[tuple[int, ...], torch.dtype | None]:
    """Return shape and dtype of a node's output; an empty shape and ``None`` if they are unknown."""
    metadata = getattr(node, "_input_metadata", ())  # the input of the backward function is the output of the forward
    if len(metadata) != 1:
        return (), None
    output = next(iter(metadata))
    try:
        return tuple(int(size) for size in output.shape), output.dtype
    except (RuntimeError, TypeError, ValueError):  # symbolic sizes, nested tensors
        return (), None


def saved_value(node: Any, argument: str) -> Any:
    """Return a saved number, or a saved tensor that no hook has packed; else ``None``."""
    raw = getattr(node, f"_raw_saved_{argument}", None)
    if raw is None:
        value = getattr(node, f"_saved_{argument}", None)
        return None if isinstance(value, Tensor) else value
    is_packed = getattr(raw, "unpack_hook", None) is not None
    return None if is_packed else getattr(raw, "data", None)


def is_number(value: Tensor) -> bool:
    """Return whether a saved tensor was a number of Python, and not a tensor.

    torch saves such a number as a tensor on the CPU of dtype int64 or float64 that does not take part in the promotion
    of dtypes with other zero-dimensional tensors.
    """
    if value.ndim or value.device.type != "cpu" or value.dtype not in (torch.int64, torch.float64):
        return False
    narrower = torch.int32 if value.dtype is torch.int64 else torch.float32
    return torch.result_type(torch.zeros((), dtype=narrower, device="cpu"), value) is narrower


def saved_integer(node: Any, argument: str) -> int | None:
    """Return a saved integer; ``None`` if a node has none, or several, as sums over several dimensions do."""
    number = getattr(node, f"_saved_{argument}", None)
    if not isinstance(number, int):
        return None
    return number - 2**64 if number >= 2**63 else number  # nodes read negative numbers as unsigned ones of 64 bits


def without_views(node: Any) -> Any:
    """Return the first node from this one on that is more than a view."""
    while operation_of(node) in VIEWS and len(inputs := inputs_of(node)) == 1:
        (node,) = inputs
    return node
