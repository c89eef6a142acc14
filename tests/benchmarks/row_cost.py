"""Costs of the record of rows per step and on disk, and of the digest of the data."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from loopscope.checkpoints import ROWS, RowLog, rows_entry
from loopscope.data import Loader, RowNumbers, TensorLoader, TorchLoader, fingerprint, random_order
from loopscope.engine import HookManager
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

from tests.benchmarks.digest_cost import steps_of
from tests.benchmarks.rows import MILLISECONDS, PERCENT, Effort, Row, Unit
from tests.benchmarks.subjects import mod_arithmetic
from tests.benchmarks.timing import Spread, clock

EVERY, PAPER_ROWS = 100, 300_000
PER_ROW = Unit("B", 1, 3)


def recorded_rows(effort: Effort) -> Iterator[Row]:
    """Compare the digest of an epoch's rows, and the file that holds them, with the steps of the quick preset."""
    subject = mod_arithmetic(effort.quick)
    step, count = Spread.of(steps_of(subject, effort.times(200))).median, len(subject.task.loader)
    against = f"a step of the quick preset, {1e3 * step:.2f} ms"
    dataset = TensorDataset(subject.inputs, subject.targets)
    rows, size = len(dataset), subject.batch_size
    sampler = WeightedRandomSampler(torch.ones(rows).tolist(), rows)
    kinds: dict[str, Loader] = {
        "TensorLoader, reshuffled": TensorLoader(dataset.tensors, size, random_order(rows, 1)),
        "TorchLoader, shuffled": TorchLoader(DataLoader(dataset, size, shuffle=True), 1),
        "TorchLoader, custom sampler": TorchLoader(DataLoader(dataset, size, sampler=sampler), 1),
    }
    for name, loader in kinds.items():
        subject.task.loader = loader
        manager, steps = subject.manager(), Steps(RowNumbers(loader))
        if not loader.source_of_rows().by_function:  # a run draws them for the file
            row_indices = [*loader.row_indices(0)]
            for epoch in range(effort.times(100) * EVERY // count + 2):
                steps.numbers.cache_rows(epoch, 0, row_indices)
        shares = [seconds / EVERY / step for seconds in _seconds(partial(steps.digest, manager), effort.times(100))]
        yield Row(f"Digests of rows every {EVERY} steps: {name}", against, PERCENT, Spread.of(shares), 0.001)
    with TemporaryDirectory() as folder:
        shares = [
            seconds / count / step for seconds in _seconds(lambda: _written(Path(folder), manager), effort.times(40))
        ]
        yield Row("The row file of a custom sampler", against, PERCENT, Spread.of(shares), 0.001)


@dataclass
class Steps:
    """The steps of a run, reduced to their digests of rows."""

    numbers: RowNumbers
    since: int = 0

    def digest(self, manager: HookManager) -> None:
        """Digest the rows of the next steps."""
        rows_entry(manager, self.numbers, self.since, self.since + EVERY)
        self.since += EVERY


def bytes_of_rows(effort: Effort) -> Iterator[Row]:
    """Measure the bytes on disk for each training row."""
    subject = mod_arithmetic(effort.quick)
    entry = rows_entry(subject.manager(), RowNumbers(subject.task.loader), 0, EVERY)
    bytes_per_row = len(json.dumps({**entry, "since": EVERY})) / EVERY / subject.batch_size
    yield Row(
        "Bytes per row, order from a function", f"digests every {EVERY} steps", PER_ROW, Spread.of([bytes_per_row]), 1
    )
    dataset = TensorDataset(torch.arange(PAPER_ROWS))
    sampler = WeightedRandomSampler(torch.ones(PAPER_ROWS).tolist(), PAPER_ROWS)
    subject.task.loader = TorchLoader(DataLoader(dataset, 256, sampler=sampler), 1)
    with TemporaryDirectory() as folder:
        _written(Path(folder), subject.manager())
        bytes_per_row = (Path(folder) / ROWS).stat().st_size / PAPER_ROWS
    yield Row("Bytes per row, custom sampler", f"{PAPER_ROWS:,} rows an epoch", PER_ROW, Spread.of([bytes_per_row]), 4)


def known_data(effort: Effort) -> Iterator[Row]:
    """Time the digest of the paper preset's data, which is computed once per run."""
    pairs = torch.randint(9973, (PAPER_ROWS, 2))
    loader = TensorLoader((pairs, pairs.sum(1)), 256, random_order(PAPER_ROWS, 1))
    seconds = _seconds(lambda: fingerprint(loader, lambda: None), effort.times(40))
    size = sum(array.nbytes for array in loader.source_of_rows().arrays) / 1e6
    against = f"the paper preset's {size:.1f} MB"
    yield Row("A digest of the data, at the start of a run", against, MILLISECONDS, Spread.of(seconds), 0.01)


def _written(folder: Path, manager: HookManager) -> None:
    loop = manager.state.loop
    loop.epoch, loop.step = 0, 1
    RowLog(folder, manager, RowNumbers(manager.task.loader)).pause(loop, step_ended=True)


def _seconds(function: Callable[[], Any], count: int) -> list[float]:
    function()
    found: list[float] = []
    for _ in range(count):
        begin = clock()
        function()
        found.append(clock() - begin)
    return found
