"""What a batch holds, whatever objects it is made of: found for digests and sweeps, copied, and put back."""

import copyreg
from collections.abc import Iterator, Mapping
from copy import deepcopy
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from .objects import ATOMS, is_code

LARGEST = 10_000
"""Objects and containers in one batch; what reaches more is no batch."""


def held_by(value: Any) -> dict[str, Any] | None:
    """Return the attributes of an object, those in slots too, or ``None`` for a value that has none or is code."""
    if type(value) in ATOMS or isinstance(value, (Tensor, nn.Module, Enum)) or is_code(value):
        return None
    slots: list[str] = copyreg._slotnames(type(value))  # type: ignore[attr-defined]  # with inherited and private ones
    space = getattr(value, "__dict__", None)
    if space is None and not slots:
        return None
    return {name: getattr(value, name) for name in slots if hasattr(value, name)} | (space or {})


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
        return {**value} if type(value) is dict else {**(held_by(value) or {}), **value}
    return held_by(value)


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


class Kept(NamedTuple):
    """What is needed to put a batch back, beyond the dicts, lists, tuples and tensors that can be walked."""

    walked: tuple[Any, ...]
    """Attributes of its objects, which are to be walked and copied as well."""
    slots: list[tuple[Any, dict[str, Any]]]
    arrays: list[tuple["np.ndarray[Any, Any]", "np.ndarray[Any, Any]"]]
    """Arrays, each with a copy."""

    @classmethod
    def of(cls, batch: Any) -> "Kept":
        """Find and copy it."""
        found = [value for _, value, _ in visited("", batch)]
        objects = [(value, held) for value in found if type(value) is not dict and (held := held_by(value)) is not None]
        spaces = [vars(value) for value, _ in objects if hasattr(value, "__dict__")]
        slots = [(value, _without(held, getattr(value, "__dict__", {}))) for value, held in objects]
        inner = [item for _, held in slots for item in held.values()]
        arrays = [value for value in found if isinstance(value, np.ndarray) and value.flags.writeable]
        return cls((*spaces, *inner), slots, [(array, array.copy()) for array in arrays])

    def put_back(self) -> None:
        """Put back the contents of slots, also of frozen objects, and of arrays."""
        for value, held in self.slots:
            for name, item in held.items():
                object.__setattr__(value, name, item)
        for array, copy in self.arrays:
            array[...] = copy


def _without(held: dict[str, Any], space: Mapping[str, Any]) -> dict[str, Any]:
    return {name: item for name, item in held.items() if name not in space}


def copy_of_batch(batch: Any) -> Any:
    """Return a copy that shares no memory with a batch: of views their part alone, as the whole may be a data set."""
    clones = {id(tensor): tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in tensors_of(batch)}
    return deepcopy(batch, clones)
