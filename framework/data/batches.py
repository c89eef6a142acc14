"""Functions that count the samples of a batch of any structure and split it into micro-batches."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import LoopscopeError
from ..state import visited

ROWED = (Tensor, np.ndarray)


class MicroBatches(list[Any]):
    """The micro-batches of one step in a custom training loop, whose losses add up."""


class SeparateBatches(MicroBatches):
    """Batches that count as one, whose loss is the mean of their mean losses, weighted by their rows."""


def _tensors(batch: Any) -> Iterator[Any]:
    """Yield the tensors and arrays of a batch that have rows, in order."""
    return (leaf for _, leaf, _ in visited("", batch) if isinstance(leaf, ROWED) and leaf.ndim)


def rows(batch: Any) -> int:
    """Return the number of samples in a batch: the length of its first tensor or array."""
    if isinstance(batch, MicroBatches):
        return sum(map(rows, batch))
    for tensor in _tensors(batch):
        return len(tensor)
    kind = type(batch).__name__
    raise LoopscopeError(
        f"A batch of type {kind} has no samples; give batches with a tensor or an array that has rows."
    )


def rows_if_any(batch: Any) -> int | None:
    """Return the number of samples in a batch, or ``None`` for one without samples."""
    try:
        return rows(batch)
    except LoopscopeError:
        return None


def micro_batches(batch: Any, pieces: int) -> list[Any]:
    """Split a batch along the first dimension of its tensors into at most ``pieces`` parts of the same structure.

    Tensors, arrays, tuples (also named ones), lists, dataclasses and mappings are split; a mapping's parts are dicts.
    Values without rows (numbers, texts, ``None``, zero-dimensional tensors) are part of every micro-batch.
    The parts of :class:`MicroBatches` are its members, as separate batches, for any ``pieces``; a single one is split.

    Raises:
        LoopscopeError: if the tensors have different lengths, or are in an object of another type.

    >>> import torch
    >>> micro_batches({"x": torch.arange(3), "scale": 2.0}, 2)
    [{'x': tensor([0, 1]), 'scale': 2.0}, {'x': tensor([2]), 'scale': 2.0}]
    """
    if isinstance(batch, MicroBatches):
        # Parts with another identity, since a Trainer scales the losses of the step's own micro-batches.
        parts = [part_of(part, slice(None)) for part in batch]
        return parts if len(parts) != 1 else micro_batches(parts[0], pieces)
    if pieces == 1:
        return [batch]
    count = rows(batch)
    lengths = {len(tensor) for tensor in _tensors(batch)}
    if lengths != {count}:
        raise LoopscopeError(
            f"A batch whose tensors have {sorted(lengths)} rows cannot be split into micro-batches; "
            "set accumulation_steps to 1, or give every tensor one row per sample."
        )
    # rows per part, rounded up, so that there are at most ``pieces`` parts
    size = -(-count // pieces)
    return [part_of(batch, slice(first, first + size)) for first in range(0, count, size)]


def part_of(item: Any, window: slice | Sequence[int] | Tensor) -> Any:
    """Return a batch with the rows in ``window``, a slice or row numbers; values without rows are unchanged.

    >>> part_of({"x": torch.arange(3), "scale": 2.0}, [2, 0])
    {'x': tensor([2, 0]), 'scale': 2.0}
    """
    if isinstance(window, Tensor):
        window = window.tolist()
    if isinstance(item, MicroBatches):
        return _rows_of_parts(item, window)
    if isinstance(item, Tensor) and item.layout is not torch.strided:
        raise LoopscopeError(
            f"A batch with a tensor of layout {item.layout} cannot be split into micro-batches; set accumulation_steps "
            "to 1, or give dense tensors."
        )
    if isinstance(item, ROWED):
        return item[window] if item.ndim else item
    if isinstance(item, Mapping):
        return {key: part_of(value, window) for key, value in item.items()}
    if isinstance(item, (list, tuple)):
        parts = [part_of(value, window) for value in item]
        return type(item)(*parts) if isinstance(item, tuple) and type(item) is not tuple else type(item)(parts)
    if is_dataclass(item) and not isinstance(item, type):
        named = {field.name: getattr(item, field.name) for field in fields(item) if field.init}
        return replace(item, **{name: part_of(value, window) for name, value in named.items()})
    if next(_tensors(item), None) is not None:
        raise LoopscopeError(
            f"A batch with a {type(item).__name__} cannot be split into micro-batches; set accumulation_steps to 1, or "
            "give batches that are tensors or arrays, or tuples, lists, dicts or dataclasses of them."
        )
    return item


def _rows_of_parts(parts: MicroBatches, window: slice | Sequence[int]) -> SeparateBatches:
    """Return the rows of micro-batches, counted over all of them, as batches of those that have any of these rows."""
    places = range(rows(parts))[window] if isinstance(window, slice) else window
    kept, first = SeparateBatches(), 0
    for part in parts:
        size = rows(part)
        if own := [place - first for place in places if first <= place < first + size]:
            kept.append(part_of(part, own))
        first += size
    return kept
