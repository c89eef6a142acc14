"""A loader for PyTorch's ``DataLoader``: batches and row numbers as functions of (seed, epoch, batch)."""

from collections.abc import Callable, Iterator, Sized
from copy import copy, deepcopy
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import data
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, Sampler, SequentialSampler

from ..errors import UsageError
from ..state import RandomStreams
from .batch_indices import batch_indices, draw_all_rows, draws_by_function, on_streams, rows_by_function, samplers_of
from .generators import all_holders, dataset_generators, seed_all, undisturbed
from .loader_inspection import preserved_loader
from .loaders import Batch, Loader, SourceOfRows, as_defined, derived_seed


@dataclass(eq=False)
class SeededBatches(Dataset[Any]):
    """The batches of a dataset as functions of (seed, epoch, batch number, indices).

    Before the items of a batch are fetched, the global generators of torch, Python and NumPy and the generators of the
    dataset are seeded. The generators of the dataset are restored afterwards; the caller restores the global ones.

    Args:
        dataset: the dataset of the items.
        collate: makes a batch of a list of items, or of one item without batching.
        streams: the streams that seed the generators.
        epoch: the epoch of the batches.
        batched: whether an index is a list of indices.
    """

    dataset: Any
    collate: Callable[[Any], Any]
    streams: RandomStreams
    epoch: int
    batched: bool

    def __getitem__(self, numbered: tuple[int, Any]) -> Any:
        number, index = numbered
        self.streams.derive(f"loader/{self.epoch}", "batch", number)
        generators = dataset_generators(self.dataset)
        with undisturbed(generators):
            seed_all(generators)
            if not self.batched:
                items = self.dataset[index]
            elif hasattr(self.dataset, "__getitems__"):  # such as torch's Subset
                items = self.dataset.__getitems__(index)
            else:
                items = [self.dataset[item] for item in index]
            return self.collate(items)


def return_unchanged(batch: Any) -> Any:
    """Return a batch that is already collated."""
    return batch


def start_worker(init: Callable[[int], None] | None, worker: int) -> None:
    """Set the user's dataset in ``get_worker_info()``, then call the user's ``worker_init_fn``.

    User code does not expect a :class:`SeededBatches` there.
    """
    info = data.get_worker_info()
    assert info is not None
    assert isinstance(info.dataset, SeededBatches)
    # torch's WorkerInfo is read-only and refuses plain assignment.
    object.__setattr__(info, "dataset", info.dataset.dataset)
    if init is not None:
        init(worker)


PROCESS_OPTIONS = ("num_workers", "pin_memory", "timeout", "multiprocessing_context", "prefetch_factor")
"""Options of a DataLoader that determine in which process batches are made and how they are transferred."""


def without_generators(dataloader: "DataLoader[Any]") -> "DataLoader[Any]":
    """Return a shallow copy of a DataLoader and its samplers, without generators and without persistent workers.

    Persistent workers keep their position, and one iterator of the DataLoader.
    """

    def copy_sampler(sampler: Any) -> Any:
        if isinstance(sampler, BatchSampler):
            sampler = copy(sampler)
            sampler.sampler = copy_sampler(sampler.sampler)
        elif isinstance(sampler, (RandomSampler, data.SubsetRandomSampler, data.WeightedRandomSampler)):
            sampler = copy(sampler)
            sampler.generator = None
        elif hasattr(sampler, "set_epoch"):
            # set_epoch() is called on the copy, since the original may be at another epoch.
            sampler = copy(sampler)
        return sampler

    result = copy(dataloader)
    # Set in the __dict__, since a DataLoader rejects assignments to its samplers.
    vars(result).update(
        generator=None,
        sampler=copy_sampler(dataloader.sampler),
        batch_sampler=copy_sampler(dataloader.batch_sampler),
        persistent_workers=False,
        _iterator=None,
    )
    return result


def with_copied_samplers(dataloader: "DataLoader[Any]") -> "DataLoader[Any]":
    """Return a shallow copy of a DataLoader with deep copies of custom samplers, which share data sets and modules.

    A custom sampler may keep a position or weights in its attributes, which a pass over the original would move.

    Raises:
        UsageError: if a sampler cannot be copied.
    """
    parts: dict[str, Any] = {"sampler": dataloader.sampler, "batch_sampler": dataloader.batch_sampler}
    if all(type(sampler).__module__.startswith("torch.") for sampler in samplers_of(dataloader)):
        return dataloader
    held = all_holders(*samplers_of(dataloader), kinds=(Dataset, Sampler, nn.Module))
    shared = [dataloader.dataset, *(item for item in held if isinstance(item, (Dataset, nn.Module)))]
    memo = {id(item): item for item in shared}
    result = copy(dataloader)
    for name, sampler in parts.items():
        try:
            vars(result)[name] = deepcopy(sampler, memo)
        except Exception as error:
            raise UsageError(
                f"The sampler of loader= ({type(sampler).__name__}) cannot be copied ({error}), so hooks that read the "
                "data would move its position in the training; give a list of batches or a function that draws a "
                "batch, or leave loader= out."
            ) from error
    return result


class TorchLoader(Loader):
    """A ``torch.utils.data.DataLoader`` as a function of (seed, epoch, batch): every batch is seeded separately.

    The order of an epoch is drawn on separate random streams. Before the items of a batch are fetched and collated, in
    the main process or in a worker, the global generators of torch, Python and NumPy are seeded from (seed, epoch,
    batch). So a batch depends neither on the first batch of the iteration nor on the number of workers, and earlier
    batches need not be loaded. Generators in attributes of a dataset or a sampler are seeded in the same way. A
    generator that was given to the DataLoader or to a torch sampler is not used, since its position would depend on the
    past; the DataLoader itself keeps it and its order.

    A stream (``IterableDataset``) and a DataLoader with a custom iteration cannot skip batches: they are functions of
    (seed, epoch), and starting at a later batch loads and discards the earlier ones.
    """

    def __init__(self, dataloader: "DataLoader[Any]", seed: int) -> None:
        if dataloader.num_workers and not dataloader.in_order:
            raise UsageError(
                "A DataLoader with in_order=False yields batches in the order in which workers finish; set it to True."
            )
        self._dataloader = without_generators(dataloader)
        self._streams = RandomStreams(seed)
        self._samplers = samplers_of(self._dataloader)
        streams = isinstance(dataloader.dataset, (data.IterableDataset, data.MapDataPipe))
        self._skips = type(dataloader).__iter__ is DataLoader.__iter__ and not streams

    def batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Yield the batches of the DataLoader."""
        source = self._dataloader
        if not self._skips:
            replayed = on_streams(self._streams, epoch, self._samplers, [source.dataset], partial(iter, source))
            yield from islice(replayed, start, None)
            return
        batched = source.batch_sampler is not None
        with self._streams.preserved():
            # iter() of a DataLoader draws the base seed of its workers from torch's global generator.
            self._streams.derive("loader", "workers", epoch)
            dataloader: DataLoader[Any] = DataLoader(
                SeededBatches(source.dataset, source.collate_fn, self._streams, epoch, batched=batched),
                # Without torch's batching, each item of the sampler, (number, indices), makes one complete batch.
                batch_size=None,
                sampler=enumerate(self._indices(source, epoch, start), start),
                collate_fn=return_unchanged,
                worker_init_fn=partial(start_worker, source.worker_init_fn) if source.num_workers else None,
                **{name: getattr(source, name) for name in PROCESS_OPTIONS},
            )
            iterator = iter(dataloader)
        while True:
            # Without workers, the batch is made in this process, where it seeds the global generators.
            with self._streams.preserved():
                try:
                    batch = next(iterator)
                except StopIteration:
                    return
            yield batch

    def row_indices(self, epoch: int, start: int = 0) -> Iterator[Tensor] | None:
        """Return the indices of each batch's items without fetching items.

        The result is ``None`` for a stream, for indices that are not integers, without batching, and in a subclass with
        custom batches. A custom sampler draws the entire epoch before the first batch is returned.
        """
        source = self._dataloader
        if not (self._skips and as_defined(self, TorchLoader)):
            return None
        if draws_by_function(source):
            batches: Any = source.batch_sampler
            return None if batches is None else rows_by_function(batches, start, partial(self._draw, epoch))
        with preserved_loader(self):
            return draw_all_rows(source, self._streams, epoch, start, partial(self._draw, epoch), len(self) - start)

    def source_of_rows(self) -> SourceOfRows:
        """Return the length of the dataset, and the tensors of a ``TensorDataset``."""
        dataset: Any = self._dataloader.dataset
        plain = type(dataset) is data.TensorDataset and self._skips and type(self).batches is TorchLoader.batches
        tensors = dataset.tensors if plain else ()
        rows = len(dataset) if isinstance(dataset, Sized) and self._skips else None
        return SourceOfRows(rows, tensors, draws_by_function(self._dataloader))

    @property
    def copies(self) -> bool:
        """Whether every batch has its own memory: rows that torch stacks do."""
        source = self._dataloader
        stacks = source.batch_sampler is not None and source.collate_fn is data.default_collate
        return stacks and type(source).__iter__ is DataLoader.__iter__ and type(self).batches is TorchLoader.batches

    def __len__(self) -> int:
        return len(self._dataloader)

    def shuffled(self, seed: int) -> "TorchLoader":
        """Return a loader of the same dataset, reshuffled every epoch from (seed, epoch).

        Raises:
            UsageError: for a sampler that does more than order the dataset, since its effect on another order is
                unknown.
        """
        sampler, size, is_whole = self._order()
        if not is_whole:
            parts = (sampler, self._dataloader.batch_sampler)
            kinds = " and ".join(type(part).__name__ for part in parts if part is not None)
            raise UsageError(f"A DataLoader with {kinds} cannot be reshuffled; only an order of the whole dataset can.")
        return self._in_random_order(self._dataloader.dataset, size, seed)

    def drawn(self, seed: int) -> "TorchLoader":
        """Return a loader of the rows that epoch 0 visits, reshuffled every epoch from (seed, epoch).

        Samplers that visit the same rows of a dataset in different orders draw the same batches.

        Raises:
            UsageError: for a stream, whose rows have no numbers.
        """
        dataset: Any = self._dataloader.dataset
        if not self._skips:
            raise UsageError(
                f"A DataLoader of {type(dataset).__name__} streams rows, so they cannot be drawn in another order."
            )
        sampler, size, is_whole = self._order()
        if is_whole:
            visited: Any = range(len(dataset))
        elif type(self._dataloader.batch_sampler) in (BatchSampler, type(None)):
            # Row by row, since the rows that drop_last omits depend on the order.
            visited = sorted(set(self._indices(DataLoader(dataset, batch_size=None, sampler=sampler), 0)))
        else:
            batches = list(self._indices(self._dataloader, 0))
            visited, size = sorted(set(chain.from_iterable(batches))), max(map(len, batches))
        return self._in_random_order(data.Subset(dataset, visited), size, seed)

    def _order(self) -> tuple[Any, int | None, bool]:
        """Return the sampler of rows, the batch size, and whether the order is torch's order of the entire dataset."""
        batches: Any = self._dataloader.batch_sampler
        holder: Any = batches if type(batches) is BatchSampler else self._dataloader
        is_known = type(holder.sampler) in (SequentialSampler, RandomSampler) and (batches is None or batches is holder)
        rows: Any = self._dataloader.dataset
        return holder.sampler, holder.batch_size, is_known and len(holder.sampler) == len(rows)

    def _indices(self, dataloader: "DataLoader[Any]", epoch: int, start: int = 0) -> Iterator[Any]:
        """Yield the indices of each batch from batch ``start`` on, single ones without batching.

        Samplers that are iterated over draw on the loader's streams; orders that are computed use generators of the
        epoch.
        """
        indices = partial(batch_indices, dataloader, start, partial(self._draw, epoch))
        if draws_by_function(dataloader):
            return indices()
        return on_streams(self._streams, epoch, samplers_of(dataloader), (), indices)

    def _draw(self, epoch: int, block: int) -> torch.Generator:
        """Return the generator of a block of rows of the epoch."""
        return torch.Generator().manual_seed(derived_seed(self._streams.seed, "order", epoch, block))

    def _in_random_order(self, dataset: Any, batch_size: int | None, seed: int) -> "TorchLoader":
        source = self._dataloader
        batches: Any = source.batch_sampler
        reshuffled: DataLoader[Any] = DataLoader(
            dataset,
            batch_size=batch_size,
            shuffle=True,
            collate_fn=source.collate_fn,
            drop_last=batches.drop_last if type(batches) is BatchSampler else source.drop_last,
            worker_init_fn=source.worker_init_fn,
            **{name: getattr(source, name) for name in PROCESS_OPTIONS},
        )
        return type(self)(reshuffled, seed)
