"""Loaders: batches as a function of (epoch, first batch), so that nothing needs rewinding or replaying."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import torch
import xxhash
from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler

from framework.errors import UsageError

Batch = Any  # a tensor, or a tuple, list or dict of tensors
Order = Callable[[int], Tensor]


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

    def generators(self) -> tuple[torch.Generator, ...]:
        """Return the random generators that this loader owns."""
        return ()

    def __iter__(self) -> Iterator[Batch]:
        """Iterate over the batches of epoch 0."""
        return self.batches(0)


class TensorLoader(Loader):
    """Batches gathered from tensors in memory, each by one index tensor.

    Args:
        tensors: equally long along the first dimension; a batch is the tuple of their gathered rows.
        batch_size: rows per batch; the last batch of an epoch may be smaller.
        order: maps an epoch to the permutation of rows it uses.
    """

    def __init__(self, tensors: Sequence[Tensor], batch_size: int, order: Order) -> None:
        self._tensors = tuple(tensors)
        self._batch_size = batch_size
        self._order = order

    def batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Yield tuples of tensors with ``batch_size`` rows each."""
        for index in self._order(epoch).split(self._batch_size)[start:]:
            yield tuple([tensor[index] for tensor in self._tensors])

    def __len__(self) -> int:
        """Return the number of batches in an epoch."""
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


class TorchLoader(Loader):
    """A ``torch.utils.data.DataLoader``, made a function of the epoch by seeding its own generator.

    Reshuffling and worker seeds come from (seed, epoch). Starting at a later batch loads and drops the earlier ones.
    """

    def __init__(self, dataloader: "DataLoader[Any]", seed: int) -> None:
        if dataloader.persistent_workers:
            raise UsageError("A DataLoader with persistent_workers=True has one shared position; set it to False.")
        self._generator = torch.Generator()
        self._dataloader = dataloader
        self._seed = seed
        dataloader.generator = self._generator
        if isinstance(dataloader.sampler, RandomSampler):
            dataloader.sampler.generator = self._generator

    def batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Yield what the DataLoader yields."""
        self._generator.manual_seed(derived_seed(self._seed, "order", epoch))
        return islice(iter(self._dataloader), start, None)

    def __len__(self) -> int:
        """Return the number of batches in an epoch."""
        return len(self._dataloader)

    def shuffled(self, seed: int) -> "TorchLoader":
        """Return a loader of the same dataset, reshuffled every epoch from (seed, epoch)."""
        source = self._dataloader
        again: DataLoader[Any] = DataLoader(
            source.dataset,
            batch_size=source.batch_size,
            shuffle=True,
            num_workers=source.num_workers,
            collate_fn=source.collate_fn,
            drop_last=source.drop_last,
        )
        return TorchLoader(again, seed)

    def generators(self) -> tuple[torch.Generator, ...]:
        """Return the generator that orders the data."""
        return (self._generator,)


def rows(batch: Batch) -> int:
    """Return the number of samples in a batch: the length of its first tensor."""
    if isinstance(batch, Tensor):
        return len(batch)
    first = next(iter(batch.values() if isinstance(batch, dict) else batch))
    return rows(first)


def micro_batches(batch: Batch, pieces: int) -> list[Batch]:
    """Split a batch along the first dimension of its tensors into at most ``pieces`` parts."""
    if pieces == 1:
        return [batch]
    if isinstance(batch, Tensor):
        return list(batch.chunk(pieces))
    if isinstance(batch, dict):
        parts = zip(*(micro_batches(item, pieces) for item in batch.values()), strict=True)
        return [dict(zip(batch, part, strict=True)) for part in parts]
    return [type(batch)(part) for part in zip(*(micro_batches(item, pieces) for item in batch), strict=True)]
