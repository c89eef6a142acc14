"""Loaders: batches as a function of (epoch, first batch), so that resuming needs no rewinding or replaying."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from torch import Tensor

from ..errors import InvalidExperimentError, UsageError, require

Batch = Any  # a tensor, or a tuple, list or dict of tensors; see framework/data/batches.py
Order = Callable[[int], Tensor]


class SourceOfRows(NamedTuple):
    """The source of a loader's rows, to the extent that it is known."""

    rows: int | None = None
    """Number of rows."""
    arrays: Sequence[Tensor | np.ndarray] = ()
    """All arrays from which batches are gathered; empty if batches are made in another way."""
    by_function: bool = True
    """Whether the order of numbered rows is a function of the epoch instead of a custom sampler."""


class Loader(ABC):
    """The training data of a run in order; concurrent iterations are safe, since a loader has no position."""

    @abstractmethod
    def batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Yield the batches of ``epoch`` from batch ``start`` on."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of batches in an epoch."""

    @abstractmethod
    def shuffled(self, seed: int) -> "Loader":
        """Return a loader of the same data in an order drawn from ``seed``."""

    def steps_until(self, epoch: int) -> int:
        """Return the planned number of steps before ``epoch`` starts."""
        return epoch * len(self)

    def drawn(self, seed: int) -> "Loader":
        """Return a loader of the same data in an order that depends only on ``seed``, not on this loader's order.

        Measurements on its first batches are comparable between orders.

        Raises:
            LoopscopeError: if the rows cannot be identified independently of this loader's order.
        """
        return self.shuffled(seed)

    def generators(self) -> tuple[torch.Generator, ...]:
        """Return the random generators of this loader."""
        return ()

    def row_indices(self, epoch: int, start: int = 0) -> Iterator[Tensor] | None:
        """Return, for each batch of ``epoch`` from batch ``start`` on, the numbers of its rows in the data set.

        Each is int64 of shape (rows,) on the CPU, and the caller may change it; the call has no side effects. ``None``
        means that rows have no numbers.
        """
        return None

    def source_of_rows(self) -> SourceOfRows:
        """Return the source of the rows, by which the record of a run detects changes of the data."""
        return SourceOfRows()

    @property
    def copies(self) -> bool:
        """Whether every batch has its own memory, so that writing to it does not change the data."""
        return False

    def __iter__(self) -> Iterator[Batch]:
        """Iterate over the batches of epoch 0."""
        return self.batches(0)


def as_defined(loader: Loader, kind: type[Loader]) -> bool:
    """Return whether the row indices of ``kind`` apply to a loader: a subclass may yield different batches."""
    return type(loader).batches is kind.batches or type(loader).row_indices is not kind.row_indices


PIECE = 256
"""Number of batches whose indices are split and copied at once: faster than one by one, and starts sooner than all."""


class TensorLoader(Loader):
    """Batches gathered from tensors in memory, each by one index tensor.

    Args:
        tensors: equally long along the first dimension; a batch is the tuple of their gathered rows.
        batch_size: rows per batch; the last batch of an epoch may be smaller.
        order: maps an epoch to the permutation of rows it uses.
    """

    def __init__(self, tensors: Sequence[Tensor], batch_size: int, order: Order) -> None:
        self._tensors = tuple(tensors)
        lengths = [len(tensor) for tensor in self._tensors]
        if not lengths or min(lengths) != max(lengths) or not lengths[0]:
            raise UsageError(f"The tensors of a loader have {lengths} rows; give all the same number, at least one.")
        require(batch_size >= 1, f"batch_size is {batch_size}; it must be at least 1.")
        if not callable(order):
            kind = type(order).__name__
            raise UsageError(
                f"The order is a {kind}, not a function of the epoch; give, for example, fixed_order(permutation)."
            )
        self._batch_size = batch_size
        self._order = order

    def batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Yield tuples of tensors with ``batch_size`` rows each."""
        devices = {tensor.device for tensor in self._tensors}
        for piece in self._pieces(self._checked_order(epoch), start):
            # Gathering by an index on the host would copy it for each tensor, and wait for the device every time.
            indices = {device: self._split(piece.to(device)) for device in devices}
            gathered = [map(tensor.__getitem__, indices[tensor.device]) for tensor in self._tensors]
            yield from zip(*gathered, strict=True)

    def row_indices(self, epoch: int, start: int = 0) -> Iterator[Tensor] | None:
        """Return the rows of each batch in the order of ``epoch``; ``None`` in a subclass with custom batches."""
        if not as_defined(self, TensorLoader):
            return None
        order = self._checked_order(epoch).to("cpu", torch.int64, copy=True)
        return chain.from_iterable(map(self._split, self._pieces(order, start)))

    def source_of_rows(self) -> SourceOfRows:
        """Return the tensors, or none in a subclass with custom batches."""
        return SourceOfRows(len(self._tensors[0]), self._tensors if self.copies else ())

    def _checked_order(self, epoch: int) -> Tensor:
        order = self._order(epoch)
        if len(order) != len(self._tensors[0]):
            raise InvalidExperimentError(
                f"The order of epoch {epoch} has {len(order)} rows, the data {len(self._tensors[0])}; "
                "return a permutation of all rows."
            )
        return order

    def _pieces(self, order: Tensor, start: int) -> Iterator[Tensor]:
        """Yield the order from batch ``start`` on, in pieces of many batches."""
        size = PIECE * self._batch_size
        for first in range(start * self._batch_size, len(order), size):
            yield order[first : first + size]

    def _split(self, piece: Tensor) -> tuple[Tensor, ...]:
        return piece.split(self._batch_size)  # type: ignore[no-any-return, no-untyped-call]

    @property
    def copies(self) -> bool:
        """Whether every batch has its own memory: gathered rows do."""
        return type(self).batches is TensorLoader.batches

    def __len__(self) -> int:
        # rounded up, since the last batch may be shorter
        return -(-len(self._tensors[0]) // self._batch_size)

    def shuffled(self, seed: int) -> "TensorLoader":
        """Return a loader of the same rows, reshuffled every epoch from (seed, epoch)."""
        return TensorLoader(self._tensors, self._batch_size, random_order(len(self._tensors[0]), seed))


def fixed_order(permutation: Tensor) -> Order:
    """Return an order with the same permutation in every epoch."""

    def order(epoch: int) -> Tensor:
        return permutation

    return order


def random_order(rows: int, seed: int) -> Order:
    """Return an order that draws a new permutation for every epoch, from (seed, epoch) only."""

    def order(epoch: int) -> Tensor:
        generator = torch.Generator().manual_seed(derived_seed(seed, "order", epoch))
        return torch.randperm(rows, generator=generator)

    return order


def derived_seed(*parts: object) -> int:
    """Return a 63-bit seed that depends only on the parts, the same on every machine."""
    return xxhash.xxh3_64_intdigest("/".join(map(str, parts)).encode()) >> 1
