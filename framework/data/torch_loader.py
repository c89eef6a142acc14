"""PyTorch's ``DataLoader`` as a loader: batches and the numbers of their rows as functions of (seed, epoch, batch)."""

from collections.abc import Callable, Iterator, Sized
from copy import copy
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.utils import data
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, SequentialSampler

from ..errors import UsageError
from ..state import RandomStreams
from .batch_indices import Draw, EpochSampler, batch_indices, draws_by_function, on_streams, samplers_of
from .generators import dataset_generators, seed_all, undisturbed
from .loader_inspection import preserved_loader
from .loaders import Batch, Loader, SourceOfRows, as_defined, derived_seed
from .sampled_rows import draw_all_rows, rows_of_known_sampler


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


def return_unchanged(batch: Any) -> Any:
    """Return a batch that is collated already."""
    return batch


def start_worker(init: Callable[[int], None] | None, worker: int) -> None:
    """Show the dataset itself in ``get_worker_info()``, then call the ``worker_init_fn`` of the DataLoader's owner.

    They know nothing of :class:`SeededBatches`.
    """
    info = data.get_worker_info()
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
        elif isinstance(sampler, (RandomSampler, data.SubsetRandomSampler, data.WeightedRandomSampler)):
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
        streams = isinstance(dataloader.dataset, (data.IterableDataset, data.MapDataPipe))
        self._skips = type(dataloader).__iter__ is DataLoader.__iter__ and not streams

    def batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Yield what the DataLoader yields."""
        source = self._dataloader
        if not self._skips:
            replayed = on_streams(self._streams, epoch, self._samplers, [source.dataset], lambda: iter(source))
            yield from islice(replayed, start, None)
            return
        batched = source.batch_sampler is not None
        with self._streams.isolated():
            self._streams.derive("loader", "workers", epoch)
            dataloader: DataLoader[Any] = DataLoader(
                SeededBatches(source.dataset, source.collate_fn, self._streams, epoch, batched=batched),
                batch_size=None,
                sampler=enumerate(self._indices(source, epoch, start), start),
                collate_fn=return_unchanged,
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

    def row_indices(self, epoch: int, start: int = 0) -> Iterator[Tensor] | None:
        """Return the indices by which each batch's items are fetched, without fetching any.

        ``None`` for a stream, for indices that are no integers, without batching, and in a subclass with batches of its
        own. A sampler of somebody's own draws the whole epoch before the first batch is known.
        """
        source = self._dataloader
        if not (self._skips and as_defined(self, TorchLoader)):
            return None
        if draws_by_function(source):
            batches: Any = source.batch_sampler
            return None if batches is None else rows_of_known_sampler(batches, start, self._draw(epoch))
        with preserved_loader(self):
            return draw_all_rows(source, self._streams, epoch, start, self._draw(epoch), len(self) - start)

    def source_of_rows(self) -> SourceOfRows:
        """Return the length of the dataset, and what it holds if it is one of tensors."""
        dataset: Any = self._dataloader.dataset
        plain = type(dataset) is data.TensorDataset and self._skips and type(self).batches is TorchLoader.batches
        tensors = dataset.tensors if plain else ()
        rows = len(dataset) if isinstance(dataset, Sized) and self._skips else None
        return SourceOfRows(rows, tensors, draws_by_function(self._dataloader))

    @property
    def copies(self) -> bool:
        """Whether every batch lies in memory of its own: rows that torch stacks do."""
        source = self._dataloader
        stacks = source.batch_sampler is not None and source.collate_fn is data.default_collate
        return stacks and type(source).__iter__ is DataLoader.__iter__ and type(self).batches is TorchLoader.batches

    def __len__(self) -> int:
        return len(self._dataloader)

    def shuffled(self, seed: int) -> "TorchLoader":
        """Return a loader of the same dataset, reshuffled every epoch from (seed, epoch).

        Raises :class:`UsageError` for a sampler that does more than order the dataset: what it would do to another
        order is its own affair.
        """
        sampler, size, is_whole = self._order()
        if not is_whole:
            parts = (sampler, self._dataloader.batch_sampler)
            kinds = " and ".join(type(part).__name__ for part in parts if part is not None)
            raise UsageError(f"A DataLoader with {kinds} cannot be reshuffled; only an order of the whole dataset can.")
        return self._in_random_order(self._dataloader.dataset, size, seed)

    def drawn(self, seed: int) -> "TorchLoader":
        """Return a loader of the rows that epoch 0 visits, reshuffled every epoch from (seed, epoch).

        Samplers that visit the same rows of one dataset, in whatever order, draw the same batches. Raises
        :class:`UsageError` for a stream, whose rows have no numbers.
        """
        dataset: Any = self._dataloader.dataset
        if not self._skips:
            raise UsageError(f"A DataLoader of {type(dataset).__name__} streams rows, which cannot be drawn.")
        sampler, size, is_whole = self._order()
        if is_whole:
            visited: Any = range(len(dataset))
        elif type(self._dataloader.batch_sampler) in (BatchSampler, type(None)):
            # Row by row, since what drop_last leaves out depends on the order.
            visited = sorted(set(self._indices(DataLoader(dataset, batch_size=None, sampler=sampler), 0)))
        else:
            every = list(self._indices(self._dataloader, 0))
            visited, size = sorted(set(chain.from_iterable(every))), max(map(len, every))
        return self._in_random_order(data.Subset(dataset, visited), size, seed)

    def _order(self) -> tuple[Any, int | None, bool]:
        """Return the sampler of rows, the size of a batch, and whether it is torch's own order of the whole dataset."""
        batches: Any = self._dataloader.batch_sampler
        holder: Any = batches if type(batches) is BatchSampler else self._dataloader
        is_known = type(holder.sampler) in (SequentialSampler, RandomSampler) and (batches is None or batches is holder)
        rows: Any = self._dataloader.dataset
        return holder.sampler, holder.batch_size, is_known and len(holder.sampler) == len(rows)

    def _indices(self, dataloader: "DataLoader[Any]", epoch: int, start: int = 0) -> Iterator[Any]:
        """Yield the indices of each batch from batch ``start`` on, single ones where there is no batching.

        Samplers that are iterated over draw on the loader's streams, those that are not from generators of the epoch.
        """
        indices = partial(batch_indices, dataloader, start, self._draw(epoch))
        if draws_by_function(dataloader):
            return indices()
        return on_streams(self._streams, epoch, samplers_of(dataloader), (), indices)

    def _draw(self, epoch: int) -> Draw:
        return lambda block: torch.Generator().manual_seed(derived_seed(self._streams.seed, "order", epoch, block))

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
