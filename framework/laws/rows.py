"""The rows of a batch: which dimension of the inputs they are, and which constants of a step have entries for them."""

import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from math import prod

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from .recorded_step import Constant, RecordedStep

LOOKUPS = frozenset({"__getitem__", "index_select", "gather", "take", "take_along_dim"})


class UndecidedError(Exception):
    """A law cannot be decided at this step; the message says why."""


class RowLayout(Enum):
    """Where a tensor has the entries of its rows."""

    FIRST = "dimension 0"
    SECOND = "dimension 1"
    FLAT = "dimension 0, with all entries of a row one after the other"
    FLAT_SECOND = "dimension 0, with the entries of all rows at one position one after the other"
    COPIES = "dimension 0, with all rows several times"
    PAIRS = "dimensions 0 and 1"
    POSITIONS = "dimension 0, with positions of other rows as values"


@dataclass(frozen=True)
class Rows:
    """The rows of a step."""

    count: int
    dimension: int
    """The dimension of the inputs that is the batch."""
    is_certain: bool
    """Whether a data loader or the targets show the dimension."""
    layouts: Mapping[int, RowLayout]
    """The constants with entries for rows, by index."""
    places: frozenset[int] = frozenset()
    """The constants that are tables, or as in an earlier step: they belong to places, not to rows."""
    is_joined: bool = False
    """Whether the loss gets whole numbers of all rows one after the other, in the lengths that another tensor has."""

    @classmethod
    def of(cls, step: RecordedStep, model: nn.Module, earlier: Sequence[Tensor] = ()) -> "Rows":
        """Find the rows of a step; constants that are as in an ``earlier`` step belong to places, not to rows.

        Raises:
            UndecidedError: the inputs have no common length.
        """
        inputs = {index: step.constants[index] for index in step.constants_of_passes() if step.constants[index].ndim}
        dimension, is_certain = _dimension(step, inputs, model)
        count = _common_length(inputs, dimension)
        layouts, places = {}, _tables(step) | step.weights
        is_new = len(earlier) == len(step.constants) and not all(
            _is_same(earlier[item], inputs[item]) for item in inputs
        )
        for index, tensor in enumerate(step.constants):
            is_place = is_new and index not in inputs and not _are_positions(tensor, count)
            if index in places or (is_place and _is_same(earlier[index], tensor)):
                places |= {index}
                continue
            layout = _layout(tensor, count, dimension, step, inputs, is_input=index in inputs)
            if layout is not None:
                layouts[index] = layout
        others = [tensor for index, tensor in enumerate(step.constants) if index not in inputs]
        return cls(count, dimension, is_certain, layouts, frozenset(places), _has_joined(others, count))

    def of_bundles(self, step: RecordedStep, count: int) -> list[int]:
        """Return the other constants of a step that have an entry for each of ``count`` bundles of rows."""
        others = [index for index in step.used_constants() if index not in self.places and index not in self.layouts]
        known = [(index, step.constants[index]) for index in others]
        return [
            index for index, item in known if item.ndim and len(item) == count and not isinstance(item, nn.Parameter)
        ]

    def reordered(self, tensor: Tensor, layout: RowLayout, order: Tensor) -> Tensor:
        """Return a tensor with its rows in another order, some perhaps repeated."""
        order = order.to(tensor.device)
        if layout is RowLayout.SECOND:
            return tensor[:, order]
        if layout is RowLayout.POSITIONS:
            if len(torch.unique(order)) < len(order):
                return tensor
            return order.argsort().to(tensor.dtype)[tensor[order]]
        if layout is RowLayout.PAIRS:
            return tensor[order][:, order]
        if layout is RowLayout.FLAT:
            return tensor.reshape(self.count, -1, *tensor.shape[1:])[order].flatten(0, 1)
        if layout in (RowLayout.COPIES, RowLayout.FLAT_SECOND):
            return tensor.reshape(-1, self.count, *tensor.shape[1:])[:, order].flatten(0, 1)
        return tensor[order]


def _has_joined(tensors: Sequence[Tensor], count: int) -> bool:
    """Return whether a vector has the entries of all rows, such as targets of CTC, and another one their lengths."""
    vectors = [item for item in tensors if item.ndim == 1 and item.dtype in (torch.int32, torch.int64)]
    lengths = {int(item.sum()) for item in vectors if len(item) == count} - {count}
    return any(len(item) in lengths for item in vectors)


def _tables(step: RecordedStep) -> set[int]:
    """Return the constants from which a script takes the rows of its batch by their numbers, such as all targets."""
    found = set()
    for call in step.derivations:
        items = step.items_of(call)
        if call.name in LOOKUPS and len(items) > 1 and all(isinstance(item, Constant) for item in items[:2]):
            found.add(items[0].index)
    return found


def _lengths(inputs: Mapping[int, Tensor], dimension: int) -> set[int]:
    return {item.shape[dimension] for item in inputs.values() if item.ndim > dimension} - {1}


def _common_length(inputs: Mapping[int, Tensor], dimension: int) -> int:
    lengths = _lengths(inputs, dimension)
    if not lengths:
        raise UndecidedError("the batch has one row" if inputs else "the model gets no tensors")
    if len(lengths) > 1:
        raise UndecidedError(f"the inputs have different lengths ({', '.join(map(str, sorted(lengths)))})")
    return lengths.pop()


def _dimension(step: RecordedStep, inputs: Mapping[int, Tensor], model: nn.Module) -> tuple[int, bool]:
    """Return the dimension that is the batch, and whether it is certain."""
    first, second = _lengths(inputs, 0), _lengths(inputs, 1)
    has_second = len(second) == 1 and all(item.ndim > 1 for item in inputs.values())
    if not has_second or not any(getattr(module, "batch_first", True) is False for module in model.modules()):
        return 0, True
    sizes = {item.batch_size for item in gc.get_objects() if type(item) is DataLoader}
    targets = {
        len(step.constants[index])
        for index in step.constants_of_calls() - set(inputs)
        if step.constants[index].ndim == 1
    }
    for known in (sizes, targets):
        fits = bool(first & known), bool(second & known)
        if fits[0] != fits[1]:
            return int(fits[1]), True
    return 0, False


def _layout(
    tensor: Tensor, count: int, dimension: int, step: RecordedStep, inputs: Mapping[int, Tensor], *, is_input: bool
) -> RowLayout | None:
    """Return where a constant has entries for rows; ``None`` if it has none."""
    if not tensor.ndim or isinstance(tensor, nn.Parameter):
        return None
    if _are_positions(tensor, count):
        return RowLayout.POSITIONS if len(tensor) == count else None
    length = len(tensor)
    if is_input or tensor.shape[:2] == next(iter(inputs.values())).shape[:2]:
        if tensor.ndim > dimension and tensor.shape[dimension] == count:
            return RowLayout.SECOND if dimension else RowLayout.FIRST
        if is_input:
            # The state of a recurrent layer has layers first, then rows.
            is_state = tensor.ndim == 3 and tensor.shape[1] == count != tensor.shape[2]
            return RowLayout.SECOND if is_state else None
    if tensor.shape[:2] == (count, count):
        return RowLayout.PAIRS
    if length == count:
        return RowLayout.FIRST
    if not length or length % count:
        return None
    entries = length // count
    if entries in _entries_per_row(step, inputs, count, dimension):
        return RowLayout.FLAT_SECOND if dimension else RowLayout.FLAT
    return RowLayout.COPIES if entries <= max(2, len(step.passes)) else None


def _entries_per_row(step: RecordedStep, inputs: Mapping[int, Tensor], count: int, dimension: int) -> set[int]:
    """Return the numbers of entries that a row has, in the leading dimensions of inputs and computed values."""
    shapes = {tuple(item.shape) for item in inputs.values()} | step.shapes
    found = set()
    for shape in shapes:
        if len(shape) > dimension and shape[dimension] == count:
            rest = shape[:dimension] + shape[dimension + 1 :]
            found |= {prod(rest[:end]) for end in range(1, len(rest) + 1)}
    return found


def _are_positions(tensor: Tensor, count: int) -> bool:
    """Return whether a tensor numbers the rows, such as the targets of a contrastive loss."""
    if tensor.ndim != 1 or tensor.is_floating_point() or tensor.dtype is torch.bool or len(tensor) % count:
        return False
    return torch.equal(tensor.sort().values, torch.arange(len(tensor), dtype=tensor.dtype, device=tensor.device))


def is_mask(tensor: Tensor) -> bool:
    """Return whether a tensor has only zeros and ones."""
    return tensor.dtype is torch.bool or bool(((tensor == 0) | (tensor == 1)).all())


def _is_same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)
