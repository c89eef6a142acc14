"""Loaders: batches as a function of (epoch, first batch), so that nothing needs rewinding or replaying."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import torch
import xxhash
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from framework.errors import UsageError
from framework.random_streams import RandomStreams

Batch = Any  # a tensor, or a tuple, list or dict of tensors; see framework/batches.py
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
        lengths = [len(tensor) for tensor in self._tensors]
        if not lengths or min(lengths) != max(lengths) or not lengths[0]:
            raise UsageError(f"The tensors of a loader have {lengths} rows; they need equally many, and at least one.")
        if batch_size < 1:
            raise UsageError(f"batch_size is {batch_size}; it must be at least 1.")
        self._batch_size = batch_size
        self._order = order

    def batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Yield tuples of tensors with ``batch_size`` rows each."""
        order = self._order(epoch)
        if len(order) != len(self._tensors[0]):
            raise UsageError(
                f"The order of epoch {epoch} has {len(order)} rows, the data {len(self._tensors[0])}; "
                "an order is a permutation of all rows."
            )
        pieces: tuple[Tensor, ...] = order.split(self._batch_size)  # type: ignore[no-untyped-call]
        for index in pieces[start:]:
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
    """A ``torch.utils.data.DataLoader``, made a function of (seed, epoch) by running it on random streams of its own.

    That holds for reshuffling, worker seeds, and whatever samplers and datasets draw from the global generators of
    torch, Python and NumPy. A generator given to the DataLoader or to a sampler of torch is set aside, since its
    position would depend on the past. Starting at a later batch loads and drops the earlier ones.
    """

    def __init__(self, dataloader: "DataLoader[Any]", seed: int) -> None:
        if dataloader.persistent_workers:
            raise UsageError("A DataLoader with persistent_workers=True has one shared position; set it to False.")
        self._dataloader = dataloader
        self._streams = RandomStreams(seed)
        dataloader.generator = None
        self._samplers: list[Sampler[Any] | Iterable[Any]] = [dataloader.sampler]
        if isinstance(dataloader.batch_sampler, BatchSampler):
            self._samplers.append(dataloader.batch_sampler.sampler)
        for sampler in self._samplers:
            if isinstance(sampler, (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)):
                sampler.generator = None

    def batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Yield what the DataLoader yields."""
        return islice(self._drawn(epoch), start, None)

    def _drawn(self, epoch: int) -> Iterator[Batch]:
        """Yield the epoch's batches, each drawn on the loader's streams, which wait while the caller works."""
        with self._streams.isolated():
            self._streams.derive("loader", "epoch", epoch)
            for sampler in self._samplers:
                if isinstance(sampler, DistributedSampler):
                    sampler.set_epoch(epoch)
            iterator = iter(self._dataloader)
            position = self._streams.save()
        while True:
            with self._streams.isolated():
                position.restore()
                try:
                    batch = next(iterator)
                except StopIteration:
                    return
                position = self._streams.save()
            yield batch

    def __len__(self) -> int:
        """Return the number of batches in an epoch."""
        return len(self._dataloader)

    def shuffled(self, seed: int) -> "TorchLoader":
        """Return a loader of the same dataset, reshuffled every epoch from (seed, epoch).

        Raises :class:`UsageError` for a sampler that does more than order the dataset: what it would do to another
        order is its own affair.
        """
        source = self._dataloader
        batches: Any = source.batch_sampler
        sampler: Any = batches.sampler if type(batches) is BatchSampler else source.sampler
        dataset: Any = source.dataset
        if (
            type(batches) not in (BatchSampler, type(None))
            or type(sampler) not in (SequentialSampler, RandomSampler)
            or len(sampler) != len(dataset)
        ):
            kinds = " and ".join(type(part).__name__ for part in (sampler, batches) if part is not None)
            raise UsageError(f"A DataLoader with {kinds} cannot be reshuffled; only an order of the whole dataset can.")
        again: DataLoader[Any] = DataLoader(
            dataset,
            batch_size=source.batch_size if batches is None else batches.batch_size,
            shuffle=True,
            num_workers=source.num_workers,
            collate_fn=source.collate_fn,
            pin_memory=source.pin_memory,
            drop_last=source.drop_last if batches is None else batches.drop_last,
            timeout=source.timeout,
            worker_init_fn=source.worker_init_fn,
            multiprocessing_context=source.multiprocessing_context,
            prefetch_factor=source.prefetch_factor,
        )
        return TorchLoader(again, seed)
