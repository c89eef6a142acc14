"""What a batch holds, whatever objects it is made of: found for digests and sweeps, and copied."""

from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .objects import attributes_of

LARGEST = 10_000
"""Objects and containers in one batch; what reaches more is no batch."""


def visited(path: str, value: Any, seen: set[int] | None = None) -> Iterator[tuple[str, Any, bool]]:
    """Yield a value and all that can be reached from it, each with its path and whether it holds others."""
    seen = set() if seen is None else seen
    inner = _contents(value)
    yield path, value, bool(inner)
    if inner and id(value) not in seen and len(seen) < LARGEST:
        seen.add(id(value))
        for key, item in inner.items():
            yield from visited(f"{path}/{key}", item, seen)


def _contents(value: Any) -> dict[Any, Any] | None:
    if isinstance(value, (list, tuple)):
        return dict(enumerate(value))
    if isinstance(value, Mapping):
        return {**value} if type(value) is dict else {**(attributes_of(value) or {}), **value}
    return attributes_of(value)


def leaves_of(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what holds nothing else, with its path; arrays as tensors on their memory."""
    for name, leaf, holds in visited(path, value):
        if not holds:
            yield name, _on_memory(leaf)


def tensors_of(value: Any) -> list[Tensor]:
    """Return the tensors in a batch."""
    return [leaf for _, leaf, _ in visited("", value) if isinstance(leaf, Tensor)]


def _on_memory(leaf: Any) -> Any:
    """Return a tensor on the memory of an array of numbers, anything else as it is."""
    if not isinstance(leaf, np.ndarray) or not leaf.flags.writeable:
        return leaf
    try:
        return torch.from_numpy(leaf)
    except (TypeError, ValueError):  # texts and objects, or steps backward
        return leaf


def copy_of_batch(batch: Any) -> Any:
    """Return a copy that shares no memory with a batch: of views their part alone, as the whole may be a data set."""
    clones = {id(tensor): tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in tensors_of(batch)}
    return deepcopy(batch, clones)
