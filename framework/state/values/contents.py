"""The contents of containers of plain values, which show what was written into a container in place."""

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from .containers import CONTAINERS, MUTABLE_CONTAINERS, keys_of, values_of
from .objects import ATOMS, attributes_of, kind_of

_CLOSED = ATOMS | {Tensor, nn.Parameter}
MAX_DEPTH = 8
"""Depth of nested containers that are read."""


def contents_of(value: Any, depth: int = 0) -> Any:
    """Return plain tuples that are equal while a container holds equal values, or a tensor has the same version."""
    if isinstance(value, Tensor):
        return _version(value)
    items = (*(keys_of(value) if isinstance(value, dict) else ()), *values_of(value))
    # The types, since the list [1] equals [True] and [1.0].
    kinds = (*map(type, items),)
    if depth == MAX_DEPTH or not any(map(has_contents, {*kinds})):
        return items, kinds
    return items, kinds, [contents_of(item, depth + 1) for item in items if has_contents(kind_of(item))]


def batch_contents(value: Any, depth: int = 0) -> tuple[Any, ...]:
    """Return the contents of a batch, or of a part of it, apart from its tensors and the elements of its arrays."""
    if isinstance(value, CONTAINERS):
        items = (*(keys_of(value) if isinstance(value, dict) else ()), *values_of(value))
    else:
        attributes = attributes_of(value) or {}
        items = (*attributes, *attributes.values())
    kinds = (*map(type, items),)
    if depth == MAX_DEPTH or _CLOSED.issuperset(kinds):
        return items, kinds
    return items, kinds, [batch_contents(item, depth + 1) for item in items if type(item) not in _CLOSED]


@cache
def has_contents(kind: Any) -> bool:
    """Return whether values of a type can be written to in place, or contain such values."""
    return issubclass(kind, (*MUTABLE_CONTAINERS, tuple, Tensor)) and kind is not torch.Size


def _version(tensor: Tensor) -> int:
    # Autograd counts in-place writes; only this private attribute gives the count. Inference tensors have none.
    return -1 if tensor.is_inference() else tensor._version
