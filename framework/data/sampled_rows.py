"""Row numbers of batches from a DataLoader's samplers, without loading rows."""

from collections.abc import Iterator, Sized
from itertools import chain, islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from ..state import RandomStreams
from .batch_indices import BLOCK, GeneratorOfBlock, batch_indices, random_blocks, samplers_of, start_epoch
from .generators import dataset_generators, undisturbed


def rows_of_known_sampler(batches: BatchSampler, start: int, draw: GeneratorOfBlock) -> Iterator[Tensor] | None:
    """Return the rows of each batch from batch ``start`` on, for samplers of a :data:`KNOWN` class, without a list.

    The result is ``None`` if a subset's indices are not integers.
    """
    sampler: Any = batches.sampler
    size, first = batches.batch_size, start * batches.batch_size
    if type(sampler) is SequentialSampler:
        rows = len(sampler.data_source)
        blocks: Iterator[Tensor] = (torch.arange(at, min(at + BLOCK, rows)) for at in range(first, rows, BLOCK))
    elif type(sampler) is RandomSampler:
        rows, total = len(sampler.data_source), sampler.num_samples
        blocks = random_blocks(rows, total, first, draw, replacement=sampler.replacement)
    elif (subset := as_numbers(sampler.indices)) is None:
        return None
    else:
        order = random_blocks(len(subset), len(subset), first, draw, replacement=False)
        blocks = (subset[block] for block in order)
    return _in_batches(blocks, size, drop_last=batches.drop_last)


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
