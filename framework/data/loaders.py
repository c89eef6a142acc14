"""Loaders: batches as a function of (epoch, first batch), so that nothing needs rewinding or replaying."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from typing import Any, Protocol, runtime_checkable

import torch
import xxhash
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    MapDataPipe,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
    default_collate,
    get_worker_info,
)

from ..errors import UnfitError, UsageError
from ..state import RandomStreams
from .batch_indices import EpochSampler, indices_of_epoch, on_streams, samplers_of
from .generators import dataset_generators, seed_all, undisturbed

Batch = Any  # a tensor, or a tuple, list or dict of tensors; see framework/data/batches.py
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

    def drawn(self, seed: int) -> "Loader":
        """Return a loader of the same data in an order that ``seed`` alone decides, whatever this loader's order is.

        What is measured on its first batches compares between orders. Raises :class:`LoopscopeError` where the rows of
        this order cannot be told from those of another.
        """
        return self.shuffled(seed)

    def generators(self) -> tuple[torch.Generator, ...]:
        """Return the random generators that this loader owns."""
        return ()

    @property
    def copies(self) -> bool:
        """Whether every batch lies in memory of its own, so that whoever writes to it does not write to the data."""
        return False

    def __iter__(self) -> Iterator[Batch]:
        """Iterate over the batches of epoch 0."""
        return self.batches(0)


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
        if batch_size < 1:
            raise UsageError(f"batch_size is {batch_size}; it must be at least 1.")
        if not callable(order):
            kind = type(order).__name__
            raise UsageError(f"The order is a {kind}, not a function of the epoch; give fixed_order(permutation), say.")
        self._batch_size = batch_size
        self._order = order

    def batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Yield tuples of tensors with ``batch_size`` rows each."""
        order = self._order(epoch)
        if len(order) != len(self._tensors[0]):
            raise UnfitError(
                f"The order of epoch {epoch} has {len(order)} rows, the data {len(self._tensors[0])}; "
                "an order is a permutation of all rows."
            )
        for first in range(start * self._batch_size, len(order), PIECES * self._batch_size):
            part = order[first : first + PIECES * self._batch_size]
            for index in part.split(self._batch_size):  # type: ignore[no-untyped-call]
                yield tuple([tensor[index] for tensor in self._tensors])

    @property
    def copies(self) -> bool:
        """Whether every batch lies in memory of its own: rows that are gathered do."""
        return type(self).batches is TensorLoader.batches

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


@runtime_checkable
class BatchedDataset(Protocol):
    """A dataset that fetches the items of a batch at once, as torch's ``Subset`` can."""

    def __getitems__(self, indices: list[Any]) -> list[Any]:
        """Return the items of ``indices``."""


@dataclass(eq=False)
class SeededBatches(Dataset[Any]):
    """The batches of a dataset, as functions of (seed, epoch, number of the batch, indices).

    The global generators of torch, Python and NumPy are seeded for a batch before its items are fetched, and so are
    those that the dataset holds itself, which are put back after it. The global ones are left to the caller.

    Args:
        dataset: whose items make up the batches.
        collate: makes a batch of a list of items, or of one item where there is no batching.
        streams: seed the generators.
        epoch: the batches' epoch.
        batched: whether an index is a list of them.
    """

    dataset: Any
    collate: Callable[[Any], Any]
    streams: RandomStreams
    epoch: int
    batched: bool

    def __post_init__(self) -> None:
        """Ask once what is slow to ask."""
        self._fetches_at_once = self.batched and isinstance(self.dataset, BatchedDataset)

    def __getitem__(self, numbered: tuple[int, Any]) -> Any:
        """Return the batch with this number and these indices."""
        number, index = numbered
        self.streams.derive(f"loader/{self.epoch}", "batch", number)
        generators = dataset_generators(self.dataset)
        with undisturbed(generators):
            seed_all(generators)
            if not self.batched:
                items = self.dataset[index]
            elif self._fetches_at_once:
                items = self.dataset.__getitems__(index)
            else:
                items = [self.dataset[each] for each in index]
            return self.collate(items)


def as_it_is(batch: Any) -> Any:
    """Return a batch that is collated already."""
    return batch


def start_worker(init: Callable[[int], None] | None, worker: int) -> None:
    """Show the dataset itself in ``get_worker_info()``, then call the ``worker_init_fn`` of the DataLoader's owner.

    They know nothing of :class:`SeededBatches`.
    """
    info = get_worker_info()
    assert info is not None
    assert isinstance(info.dataset, SeededBatches)
    object.__setattr__(info, "dataset", info.dataset.dataset)  # frozen
    if init is not None:
        init(worker)


PROCESS_OPTIONS = ("num_workers", "pin_memory", "timeout", "multiprocessing_context", "prefetch_factor")
"""Options of a DataLoader that say where batches are made, and how they come over."""


def without_generators(dataloader: "DataLoader[Any]") -> "DataLoader[Any]":
    """Return a shallow copy of a DataLoader and of the samplers that it tells what to draw, without generators."""

    def own(sampler: Any) -> Any:
        if isinstance(sampler, BatchSampler):
            sampler = copy(sampler)
            sampler.sampler = own(sampler.sampler)
        elif isinstance(sampler, (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)):
            sampler = copy(sampler)
            sampler.generator = None
        elif isinstance(sampler, EpochSampler):  # which is told epochs that its owner has not reached
            sampler = copy(sampler)
        return sampler

    found = copy(dataloader)
    # Into the table, since a DataLoader refuses to have its samplers exchanged.
    vars(found).update(generator=None, sampler=own(dataloader.sampler), batch_sampler=own(dataloader.batch_sampler))
    return found


class TorchLoader(Loader):
    """A ``torch.utils.data.DataLoader``, made a function of (seed, epoch, batch) by seeding every batch anew.

    The order of an epoch is drawn on random streams of the loader's own. Before the items of a batch are fetched and
    collated, in the main process or in a worker, the global generators of torch, Python and NumPy are seeded from
    (seed, epoch, batch): so a batch is the same from whatever batch the epoch starts and however many workers there
    are, and none before it is loaded. Generators that are attributes of a dataset or a sampler are seeded alike, and
    one given to the DataLoader or to a sampler of torch is set aside, since its position would depend on the past; the
    DataLoader itself keeps it, and its own order.

    A stream (``IterableDataset``) and a DataLoader that iterates in a way of its own cannot skip: they are functions of
    (seed, epoch), and starting at a later batch loads and drops the earlier ones.
    """

    def __init__(self, dataloader: "DataLoader[Any]", seed: int) -> None:
        if dataloader.persistent_workers:
            raise UsageError("A DataLoader with persistent_workers=True has one shared position; set it to False.")
        if dataloader.num_workers and not dataloader.in_order:
            raise UsageError(
                "A DataLoader with in_order=False yields its batches as workers happen to finish them; set it to True."
            )
        self._dataloader = without_generators(dataloader)
        self._streams = RandomStreams(seed)
        self._samplers = samplers_of(self._dataloader)
        self._skips = type(dataloader).__iter__ is DataLoader.__iter__ and not isinstance(
            dataloader.dataset, (IterableDataset, MapDataPipe)
        )

    def batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Yield what the DataLoader yields."""
        source = self._dataloader
        if not self._skips:
            replayed = on_streams(self._streams, epoch, self._samplers, [source.dataset], lambda: iter(source))
            yield from islice(replayed, start, None)
            return
        batched = source.batch_sampler is not None
        draw = lambda block: torch.Generator().manual_seed(derived_seed(self._streams.seed, "order", epoch, block))
        with self._streams.isolated():
            self._streams.derive("loader", "workers", epoch)
            dataloader: DataLoader[Any] = DataLoader(
                SeededBatches(source.dataset, source.collate_fn, self._streams, epoch, batched=batched),
                batch_size=None,
                sampler=enumerate(indices_of_epoch(source, self._streams, epoch, start, draw), start),
                collate_fn=as_it_is,
                worker_init_fn=partial(start_worker, source.worker_init_fn) if source.num_workers else None,
                **{name: getattr(source, name) for name in PROCESS_OPTIONS},
            )
            iterator = iter(dataloader)
        while True:
            with self._streams.isolated():
                try:
                    batch = next(iterator)
                except StopIteration:
                    return
            yield batch

    @property
    def copies(self) -> bool:
        """Whether every batch lies in memory of its own: rows that torch stacks do."""
        source = self._dataloader
        stacks = source.batch_sampler is not None and source.collate_fn is default_collate
        return stacks and type(source).__iter__ is DataLoader.__iter__ and type(self).batches is TorchLoader.batches

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
        return self._in_random_order(dataset, source.batch_size if batches is None else batches.batch_size, seed)

    def drawn(self, seed: int) -> "TorchLoader":
        """Return a loader of the rows that epoch 0 visits, reshuffled every epoch from (seed, epoch).

        Samplers that visit the same rows of one dataset, in whatever order, draw the same batches. Raises
        :class:`UsageError` for a stream, whose rows have no numbers.
        """
        source = self._dataloader
        batches: Any = source.batch_sampler
        dataset: Any = source.dataset
        if not self._skips:
            raise UsageError(f"A DataLoader of {type(dataset).__name__} streams rows, which cannot be drawn.")
        if type(batches) in (BatchSampler, type(None)):
            sampler: Any = source.sampler if batches is None else batches.sampler
            if type(sampler) in (SequentialSampler, RandomSampler) and len(sampler) == len(dataset):
                visited: Any = range(len(dataset))
            else:  # row by row, since what drop_last leaves out depends on the order
                visited = sorted(set(self._indices(DataLoader(dataset, batch_size=None, sampler=sampler))))
            size = source.batch_size if batches is None else batches.batch_size
        else:
            every = list(self._indices(source))
            visited, size = sorted(set(chain.from_iterable(every))), max(map(len, every))
        return self._in_random_order(Subset(dataset, visited), size, seed)

    def _indices(self, dataloader: "DataLoader[Any]") -> Iterator[Any]:
        """Yield the indices of each batch of epoch 0, single ones where there is no batching."""
        draw = lambda block: torch.Generator().manual_seed(derived_seed(self._streams.seed, "order", 0, block))
        return indices_of_epoch(dataloader, self._streams, 0, 0, draw)

    def _in_random_order(self, dataset: Any, batch_size: int | None, seed: int) -> "TorchLoader":
        source = self._dataloader
        batches: Any = source.batch_sampler
        again: DataLoader[Any] = DataLoader(
            dataset,
            batch_size=batch_size,
            shuffle=True,
            collate_fn=source.collate_fn,
            drop_last=batches.drop_last if type(batches) is BatchSampler else source.drop_last,
            worker_init_fn=source.worker_init_fn,
            **{name: getattr(source, name) for name in PROCESS_OPTIONS},
        )
        return TorchLoader(again, seed)
