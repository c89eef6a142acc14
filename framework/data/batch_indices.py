"""Row indices of an epoch's batches, starting at any batch, from a DataLoader's samplers, without loading rows."""

from collections.abc import Callable, Iterator, Sequence, Sized
from itertools import chain, count, islice
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, SubsetRandomSampler

from ..state import RandomStreams
from .generators import dataset_generators, restorer, seed_all, undisturbed

GeneratorOfBlock = Callable[[int], torch.Generator]
"""Returns the generator of the n-th block of an epoch's order, the same one at each call."""
KNOWN = (SequentialSampler, RandomSampler, SubsetRandomSampler)
"""Samplers whose order is computed here from any row on; subclasses are iterated over, since they may differ."""
BLOCK = 65_536
"""Rows that are drawn at once, with replacement."""
PIECE = 1024
"""Rows of an order that are converted to Python integers at once."""
T = TypeVar("T")


def samplers_of(dataloader: "DataLoader[Any]") -> list[Any]:
    """Return the DataLoader's sampler, its batch sampler, and the sampler in the latter."""
    batches: Any = dataloader.batch_sampler
    within = [batches.sampler] if isinstance(batches, BatchSampler) else []
    return [sampler for sampler in (dataloader.sampler, batches, *within) if sampler is not None]


def batch_indices(dataloader: "DataLoader[Any]", start: int, draw: GeneratorOfBlock) -> Iterator[Any]:
    """Yield the indices of each batch from batch ``start`` on; single indices without batching."""
    batches: Any = dataloader.batch_sampler
    if batches is None:
        return rows_from(dataloader.sampler, start, draw)
    if type(batches) is not BatchSampler:
        return islice(batches, start, None)
    size: int = batches.batch_size
    full = size if batches.drop_last else 1
    rows = rows_from(batches.sampler, start * size, draw)
    return _split(rows, size, full)


def _split(rows: Iterator[Any], size: int, smallest: int) -> Iterator[list[Any]]:
    """Yield ``rows`` in lists of ``size`` rows; a last list with fewer rows than ``smallest`` is dropped."""
    while batch := list(islice(rows, size)):
        if len(batch) >= smallest:
            yield batch


def rows_from(sampler: Any, start: int, draw: GeneratorOfBlock) -> Iterator[Any]:
    """Yield the sampler's rows from its ``start``-th row on.

    For torch's sequential and random samplers, time and memory to the first row do not depend on ``start``. Other
    samplers are iterated over up to that row.
    """
    if type(sampler) not in KNOWN:
        return islice(sampler, start, None)
    pieces = (piece for block in blocks_of(sampler, start, draw) for piece in block.split(PIECE))  # type: ignore[no-untyped-call]
    rows = (row for piece in pieces for row in piece.tolist())
    return map(sampler.indices.__getitem__, rows) if type(sampler) is SubsetRandomSampler else rows


def blocks_of(sampler: Any, start: int, draw: GeneratorOfBlock) -> Iterator[Tensor]:
    """Yield the order of a sampler of a :data:`KNOWN` class from row ``start`` on; of a subset, the positions."""
    if type(sampler) is SequentialSampler:
        rows = len(sampler.data_source)
        return (torch.arange(first, min(first + BLOCK, rows)) for first in range(start, rows, BLOCK))
    if type(sampler) is RandomSampler:
        rows, total = len(sampler.data_source), sampler.num_samples
        return random_blocks(rows, total, start, draw, replacement=sampler.replacement)
    rows = len(sampler.indices)
    return random_blocks(rows, rows, start, draw, replacement=False)


def random_blocks(rows: int, total: int, start: int, draw: GeneratorOfBlock, *, replacement: bool) -> Iterator[Tensor]:
    """Yield rows ``start`` to ``total`` of a random order of ``rows`` rows; one permutation follows another.

    With replacement, the order consists of blocks of independent draws, so that block n needs no earlier block.
    """
    size = BLOCK if replacement else rows
    if not size:
        return
    # item i of the order = item i % size of block i // size; the last block ends at ``total``
    for block in count(start // size):
        first, stop = max(0, start - block * size), min(size, total - block * size)
        if first >= stop:
            return
        drawn = draw(block)
        order = torch.randint(rows, (BLOCK,), generator=drawn) if replacement else torch.randperm(rows, generator=drawn)
        yield order[first:stop]


def draws_by_function(dataloader: "DataLoader[Any]") -> bool:
    """Return whether all samplers are torch's, so that the order is computed here instead of by iterating."""
    of_torch = type(dataloader.batch_sampler) in (BatchSampler, type(None))
    return of_torch and type(samplers_of(dataloader)[-1]) in KNOWN


def start_epoch(streams: RandomStreams, epoch: int, samplers: Sequence[Any], generators: Sequence[Any]) -> None:
    """Seed streams and generators for an epoch, and set the epoch of samplers that have ``set_epoch``."""
    streams.derive("loader", "epoch", epoch)
    seed_all(generators)
    for sampler in samplers:
        if hasattr(sampler, "set_epoch"):  # such as torch's DistributedSampler
            sampler.set_epoch(epoch)


def on_streams(
    streams: RandomStreams,
    epoch: int,
    samplers: Sequence[Any],
    others: Sequence[Any],
    make_iterator: Callable[[], Iterator[T]],
) -> Iterator[T]:
    """Yield the items of ``make_iterator()``, drawn on streams that are seeded for the epoch.

    The streams, and the generators of ``samplers`` and ``others``, are suspended while the caller works. The epoch of
    samplers that have ``set_epoch`` is set.
    """
    generators = dataset_generators(*samplers, *others)
    with streams.preserved(), undisturbed(generators):
        start_epoch(streams, epoch, samplers, generators)
        remaining = make_iterator()
        position, restore = streams.save(), restorer(generators)
    while True:
        with streams.preserved(), undisturbed(generators):
            position.restore()
            restore()
            try:
                value = next(remaining)
            except StopIteration:
                return
            position, restore = streams.save(), restorer(generators)
        yield value


def rows_by_function(batches: BatchSampler, start: int, draw: GeneratorOfBlock) -> Iterator[Tensor] | None:
    """Return the rows of each batch from batch ``start`` on, for samplers of a :data:`KNOWN` class, without a list.

    The result is ``None`` if a subset's indices are not integers.
    """
    sampler: Any = batches.sampler
    blocks = blocks_of(sampler, start * batches.batch_size, draw)
    if type(sampler) is SubsetRandomSampler:
        subset = as_numbers(sampler.indices)
        if subset is None:
            return None
        blocks = (subset[block] for block in blocks)
    return _in_batches(blocks, batches.batch_size, drop_last=batches.drop_last)


def _in_batches(blocks: Iterator[Tensor], size: int, *, drop_last: bool) -> Iterator[Tensor]:
    left = torch.empty(0, dtype=torch.int64)
    for block in blocks:
        joined = torch.cat([left, block])
        complete = len(joined) - len(joined) % size
        left = joined[complete:]
        yield from joined[:complete].split(size) if complete else ()  # type: ignore[no-untyped-call]
    if len(left) and not drop_last:
        yield left


def as_numbers(indices: Any) -> Tensor | None:
    """Return indices as int64; ``None`` for keys that are not integers."""
    try:
        array = np.asarray(indices)  # many times faster for a list than torch
    except (TypeError, ValueError, RuntimeError):
        return None
    return torch.from_numpy(array.astype(np.int64)) if array.ndim == 1 and array.dtype.kind in "iu" else None


def draw_all_rows(
    dataloader: "DataLoader[Any]", streams: RandomStreams, epoch: int, start: int, draw: GeneratorOfBlock, most: int
) -> Iterator[Tensor] | None:
    """Return the rows of at most ``most`` batches by iterating over the samplers; ``None`` unless all are integers."""
    samplers = samplers_of(dataloader)
    generators = dataset_generators(*samplers)
    with streams.preserved(), undisturbed(generators):
        start_epoch(streams, epoch, samplers, generators)
        batches = [*islice(batch_indices(dataloader, start, draw), max(0, most))]
    if not all(isinstance(batch, Sized) for batch in batches):
        return None
    numbers = as_numbers([*chain.from_iterable(batches)]) if batches else torch.empty(0, dtype=torch.int64)
    return None if numbers is None else iter(numbers.split([*map(len, batches)]))  # type: ignore[no-untyped-call]
