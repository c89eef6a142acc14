"""Which rows each batch of an epoch has: read off a DataLoader's samplers from any batch on, without loading a row."""

from collections.abc import Callable, Iterator, Sequence
from itertools import count, islice
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, SubsetRandomSampler

from ..state import RandomStreams
from .generators import dataset_generators, restorer, seed_all, undisturbed

Draw = Callable[[int], torch.Generator]
"""Gives the generator of the n-th block of an epoch's order, the same one whenever it is asked."""
KNOWN = (SequentialSampler, RandomSampler, SubsetRandomSampler)
"""Samplers that are read here from any row on; subclasses may do anything, and are iterated over."""
BLOCK = 65_536
"""Rows drawn at once, with replacement."""
PIECE = 1024
"""Rows of an order that are integers of Python at once."""
T = TypeVar("T")


@runtime_checkable
class EpochSampler(Protocol):
    """A sampler that is told the epoch before it is iterated over, as torch's ``DistributedSampler`` is."""

    def set_epoch(self, epoch: int) -> None:
        """Prepare the order of ``epoch``."""


def samplers_of(dataloader: "DataLoader[Any]") -> list[Any]:
    """List the DataLoader's samplers: its own, its batch sampler, and the one in that."""
    batches: Any = dataloader.batch_sampler
    within = [batches.sampler] if isinstance(batches, BatchSampler) else []
    return [sampler for sampler in (dataloader.sampler, batches, *within) if sampler is not None]


def batch_indices(dataloader: "DataLoader[Any]", start: int, draw: Draw) -> Iterator[Any]:
    """Yield the indices of each batch from batch ``start`` on; single indices where there is no batching."""
    batches: Any = dataloader.batch_sampler
    if batches is None:
        return rows_from(dataloader.sampler, start, draw)
    if type(batches) is not BatchSampler:
        return islice(batches, start, None)
    size: int = batches.batch_size
    full = size if batches.drop_last else 1
    rows = rows_from(batches.sampler, start * size, draw)
    return (batch for batch in iter(lambda: list(islice(rows, size)), []) if len(batch) >= full)


def rows_from(sampler: Any, start: int, draw: Draw) -> Iterator[Any]:
    """Yield what the sampler yields, from its ``start``-th row on.

    Time and memory to the first row do not depend on ``start`` for torch's samplers of a sequence or of a random order.
    Others are iterated over up to there.
    """
    if type(sampler) is SequentialSampler:
        return iter(range(start, len(sampler.data_source)))
    if type(sampler) is RandomSampler:
        rows = len(sampler.data_source)
        return random_rows(rows, sampler.num_samples, start, draw, replacement=sampler.replacement)
    if type(sampler) is SubsetRandomSampler:
        rows = len(sampler.indices)
        return map(sampler.indices.__getitem__, random_rows(rows, rows, start, draw, replacement=False))
    return islice(sampler, start, None)


def random_rows(rows: int, total: int, start: int, draw: Draw, *, replacement: bool) -> Iterator[int]:
    """Yield rows ``start`` to ``total`` of a random order of ``rows`` rows."""
    for block in random_blocks(rows, total, start, draw, replacement=replacement):
        for piece in block.split(PIECE):  # type: ignore[no-untyped-call]
            yield from piece.tolist()


def random_blocks(rows: int, total: int, start: int, draw: Draw, *, replacement: bool) -> Iterator[Tensor]:
    """Yield rows ``start`` to ``total`` of a random order of ``rows`` rows; one permutation follows another.

    With replacement the order comes in blocks too, of independent draws: so the n-th one needs none before.
    """
    size = BLOCK if replacement else rows
    if not size:
        return
    for block in count(start // size):
        first, stop = max(0, start - block * size), min(size, total - block * size)
        if first >= stop:
            return
        drawn = draw(block)
        order = torch.randint(rows, (BLOCK,), generator=drawn) if replacement else torch.randperm(rows, generator=drawn)
        yield order[first:stop]


def draws_by_function(dataloader: "DataLoader[Any]") -> bool:
    """Return whether the samplers are torch's own, whose order is read here, and not asked of them."""
    of_torch = type(dataloader.batch_sampler) in (BatchSampler, type(None))
    return of_torch and type(samplers_of(dataloader)[-1]) in KNOWN


def start_epoch(streams: RandomStreams, epoch: int, samplers: Sequence[Any], generators: Sequence[Any]) -> None:
    """Start streams and generators with an epoch, and tell it to samplers with an order for every epoch."""
    streams.derive("loader", "epoch", epoch)
    seed_all(generators)
    for sampler in samplers:
        if isinstance(sampler, EpochSampler):
            sampler.set_epoch(epoch)


def on_streams(
    streams: RandomStreams,
    epoch: int,
    samplers: Sequence[Any],
    others: Sequence[Any],
    make_iterator: Callable[[], Iterator[T]],
) -> Iterator[T]:
    """Yield what ``make_iterator()`` yields, drawn on streams that start with the epoch and wait while the caller works.

    The generators that ``samplers`` and ``others`` hold start and wait with them; samplers with an order for every
    epoch are told the epoch.
    """
    generators = dataset_generators(*samplers, *others)
    with streams.isolated(), undisturbed(generators):
        start_epoch(streams, epoch, samplers, generators)
        remaining = make_iterator()
        position, restore = streams.save(), restorer(generators)
    while True:
        with streams.isolated(), undisturbed(generators):
            position.restore()
            restore()
            try:
                value = next(remaining)
            except StopIteration:
                return
            position, restore = streams.save(), restorer(generators)
        yield value
