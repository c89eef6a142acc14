"""What ranks that train together pay for agreeing: against a bare all-reduce of one number, on three processes."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

import torch
from loopscope.training import Ranks

from tests.benchmarks.rows import TIMES, Effort, Row
from tests.benchmarks.timing import Spread, Turns, ratio
from tests.support.ranks import on_ranks

RANKS, CALLS = 3, 50


def agreements(effort: Effort) -> Iterator[Row]:
    """Measure an agreement, and the norms of shards, on ranks that share this machine."""
    with TemporaryDirectory() as folder:
        measured = on_ranks(partial(_agreements, effort.times(60)), Path(folder), RANKS)[0]
    against = f"a bare all-reduce of one number, {RANKS} processes, gloo, {1e6 * measured['bare']:.0f} µs"
    yield Row("Agreement of the ranks", against, TIMES, Spread(*measured["agreement"]), 1.3)


def _agreements(blocks: int) -> dict[str, object]:
    ranks, number = Ranks([torch.distributed.group.WORLD]), torch.zeros(())
    turns = Turns([lambda: ranks.agree(False), lambda: torch.distributed.all_reduce(number)], CALLS, timer=perf_counter)
    turns.round()
    turns.forget()
    for _ in range(blocks):
        turns.round()
    ours, bare = turns.seconds
    found = ratio(ours, bare)
    return {"agreement": (found.median, found.best, found.noise), "bare": Spread.of(bare).median}
