"""Loaders: batches as a function of (epoch, first batch), so that nothing needs rewinding or replaying."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from torch import Tensor

from ..errors import UnfitError, UsageError, require

Batch = Any  # a tensor, or a tuple, list or dict of tensors; see framework/data/batches.py
Order = Callable[[int], Tensor]


class SourceOfRows(NamedTuple):
    """What the rows of a loader are made of, as far as it says."""

    rows: int | None = None
    """How many there are."""
    arrays: Sequence[Tensor | np.ndarray] = ()
    """All that batches are gathered from; empty where they are made otherwise."""
    by_function: bool = True
    """Whether their order, if they have numbers, is a function of the epoch, and no sampler of somebody's own."""


class Loader(ABC):
    """The training data of a run, in its order; iterating twice at once is safe, since no position is kept."""

    @abstractmethod
    def batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Yield the batches of ``epoch`` from batch ``start`` on."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of batches in an epoch."""

    @abstractmethod
    def shuffled(self, seed: int) -> "Loader":
        """Return a loader of the same data in an order drawn from ``seed``."""

    def drawn(self, seed: int) -> "Loader":
        """Return a loader of the same data in an order that ``seed`` alone decides, whatever this loader's order is.

        What is measured on its first batches compares between orders. Raises :class:`LoopscopeError` where the rows of
        this order cannot be told from those of another.
        """
        return self.shuffled(seed)

    def generators(self) -> tuple[torch.Generator, ...]:
        """Return the random generators that this loader owns."""
        return ()

    def row_indices(self, epoch: int, start: int = 0) -> Iterator[Tensor] | None:
        """Return, for each batch of ``epoch`` from batch ``start`` on, the numbers of its rows in the data set.

        They are int64, of shape (rows,), on the CPU, and belong to the caller; asking for them leaves nothing behind.
        ``None``: rows have no numbers.
        """
        return None

    def source_of_rows(self) -> SourceOfRows:
        """Return what the rows are made of, for the record of a run, by which a change of the data is found."""
        return SourceOfRows()

    @property
    def copies(self) -> bool:
        """Whether every batch lies in memory of its own, so that whoever writes to it does not write to the data."""
        return False

    def __iter__(self) -> Iterator[Batch]:
        """Iterate over the batches of epoch 0."""
        return self.batches(0)


def as_defined(loader: Loader, kind: type[Loader]) -> bool:
    """Return whether the rows that ``kind`` counts are those of a loader of it: a subclass may have other batches."""
    return type(loader).batches is kind.batches or type(loader).row_indices is not kind.row_indices


PIECES = 256
"""Batches for which an order is cut up at once: that is quicker than one by one, and all take long to be cut."""


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
            raise UsageError(f"The tensors of a loader have {lengths} rows; they need equally many, and at least one.")
        require(batch_size >= 1, f"batch_size is {batch_size}; it must be at least 1.")
        if not callable(order):
            kind = type(order).__name__
            raise UsageError(f"The order is a {kind}, not a function of the epoch; give fixed_order(permutation), say.")
        self._batch_size = batch_size
        self._order = order

    def batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Yield tuples of tensors with ``batch_size`` rows each."""
        for index in self._pieces(self._checked_order(epoch), start):
            yield tuple([tensor[index] for tensor in self._tensors])

    def row_indices(self, epoch: int, start: int = 0) -> Iterator[Tensor] | None:
        """Return the rows of each batch in the order of ``epoch``; ``None`` in a subclass with batches of its own."""
        if not as_defined(self, TensorLoader):
            return None
        return self._pieces(self._checked_order(epoch).to("cpu", torch.int64, copy=True), start)

    def source_of_rows(self) -> SourceOfRows:
        """Return the tensors, or nothing in a subclass with batches of its own."""
        return SourceOfRows(len(self._tensors[0]), self._tensors if self.copies else ())

    def _checked_order(self, epoch: int) -> Tensor:
        order = self._order(epoch)
        if len(order) != len(self._tensors[0]):
            raise UnfitError(
                f"The order of epoch {epoch} has {len(order)} rows, the data {len(self._tensors[0])}; "
                "an order is a permutation of all rows."
            )
        return order

    def _pieces(self, order: Tensor, start: int) -> Iterator[Tensor]:
        for first in range(start * self._batch_size, len(order), PIECES * self._batch_size):
            part = order[first : first + PIECES * self._batch_size]
            yield from part.split(self._batch_size)  # type: ignore[no-untyped-call]

    @property
    def copies(self) -> bool:
        """Whether every batch lies in memory of its own: rows that are gathered do."""
        return type(self).batches is TensorLoader.batches

    def __len__(self) -> int:
        return -(-len(self._tensors[0]) // self._batch_size)

    def shuffled(self, seed: int) -> "TensorLoader":
        """Return a loader of the same rows, reshuffled every epoch from (seed, epoch)."""
        return TensorLoader(self._tensors, self._batch_size, random_order(len(self._tensors[0]), seed))


def fixed_order(permutation: Tensor) -> Order:
    """Use the same permutation in every epoch."""
    return lambda epoch: permutation


def random_order(rows: int, seed: int) -> Order:
    """Draw a new permutation for every epoch from (seed, epoch) alone."""

    def order(epoch: int) -> Tensor:
        generator = torch.Generator().manual_seed(derived_seed(seed, "order", epoch))
        return torch.randperm(rows, generator=generator)

    return order


def derived_seed(*parts: object) -> int:
    """Return a 63-bit seed that depends on the parts alone, the same on every machine."""
    return xxhash.xxh3_64_intdigest("/".join(map(str, parts)).encode()) >> 1
