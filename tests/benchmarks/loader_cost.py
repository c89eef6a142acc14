"""Costs of starting an epoch in the middle: the first batch after many skipped batches and after few."""

from collections import deque
from collections.abc import Iterator
from functools import partial

import numpy as np
import torch
from loopscope.data import Loader, TensorLoader, TorchLoader, random_order
from loopscope.experiments.tied_lm.tokens import TokenLoader
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from tests.benchmarks.rows import MICROSECONDS, MILLISECONDS, TIMES, Effort, Row
from tests.benchmarks.timing import Spread, Turns, difference, ratio

EARLY = 10
LATE = 100_000
BATCH = 4


def first_batches(effort: Effort) -> Iterator[Row]:
    """Compare the first batch of an epoch started late with that of one started early, for every kind of loader."""
    late = LATE if effort.share else LATE // 100
    for name, loader in _loaders(torch.arange((late + 10) * BATCH)).items():
        turns = Turns([partial(_first, loader, late), partial(_first, loader, EARLY)], calls=3)
        for _ in range(1 + effort.times(15)):
            turns.round()
        measured = [seconds[1:] or seconds for seconds in turns.seconds]
        against = f"batch {EARLY}, {1e3 * Spread.of(measured[1]).median:.2f} ms"
        yield Row(f"First batch at {late:,}, {name}", against, TIMES, ratio(*measured), 1.1)


def _loaders(rows: Tensor) -> dict[str, Loader]:
    dataset = TensorDataset(rows)
    options = {"context": 1, "batch_size": BATCH, "vocabulary": 2, "seed": 1, "device": torch.device("cpu")}
    return {
        "`TensorLoader`": TensorLoader((rows,), BATCH, random_order(len(rows), 1)),
        "`TokenLoader`": TokenLoader(np.zeros(len(rows), dtype=np.uint16), **options),
        "`TorchLoader`, in order": TorchLoader(DataLoader(dataset, BATCH), 1),
        "`TorchLoader`, shuffled": TorchLoader(DataLoader(dataset, BATCH, shuffle=True), 1),
    }


def _first(loader: Loader, start: int) -> None:
    next(loader.batches(0, start))


def skipping(effort: Effort) -> Iterator[Row]:
    """Measure the remaining cost if a sampler must be iterated up to the batch."""
    late = LATE if effort.share else LATE // 100
    dataset = TensorDataset(torch.arange((late + 10) * BATCH))
    sampler: DistributedSampler[object] = DistributedSampler(dataset, num_replicas=1, rank=0)
    loader = TorchLoader(DataLoader(dataset, BATCH, sampler=sampler), 1)
    turns = Turns([partial(_first, loader, late), partial(_first, loader, EARLY)])
    for _ in range(effort.times(9)):
        turns.round()
    against = f"batch {EARLY}, {1e3 * Spread.of(turns.seconds[1]).median:.1f} ms"
    yield Row(f"First batch at {late:,}, `DistributedSampler`", against, MILLISECONDS, difference(*turns.seconds))


def every_batch(effort: Effort) -> Iterator[Row]:
    """Measure the cost of seeding each batch and of isolating the run's random streams from it."""
    bare = DataLoader(TensorDataset(torch.arange(200 * BATCH)), BATCH)
    loader = TorchLoader(DataLoader(bare.dataset, BATCH), 1)
    turns = Turns([lambda: deque(loader.batches(0), maxlen=0), lambda: deque(bare, maxlen=0)])
    for _ in range(effort.times(15)):
        turns.round()
    ours, theirs = ([epoch / len(bare) for epoch in seconds] for seconds in turns.seconds)
    against = f"the DataLoader alone, {1e6 * Spread.of(theirs).median:.0f} µs"
    yield Row("A batch of a `TorchLoader`", against, MICROSECONDS, difference(ours, theirs))
