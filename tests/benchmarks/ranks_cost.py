"""Costs of distributed training: agreements against a bare all-reduce, rollback and checkpoints against copies."""

from collections.abc import Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import torch
from loopscope.training import Ranks

from tests.benchmarks.checkpoint_cost import INTERVAL, WINDOW, Measured
from tests.benchmarks.guardian_cost import large_shards, on_a_shard
from tests.benchmarks.rows import PERCENT, TIMES, Effort, Row
from tests.benchmarks.timing import Spread, Turns, ratio
from tests.support.ranks import on_ranks

RANKS, CALLS = 3, 50


def agreements_and_copies(effort: Effort) -> Iterator[Row]:
    """Measure an agreement, and the guardian on shards, on ranks that share this machine."""
    with TemporaryDirectory() as folder:
        measured = on_ranks(partial(_measured, effort), Path(folder), RANKS)
    found = measured[0]["agreements"]
    against = f"a bare all-reduce of one number, {RANKS} processes, gloo, {1e6 * found['bare']:.0f} µs"
    yield Row("Agreement of the ranks", against, TIMES, Spread(*found["agreement"]), 1.3)
    ours, plain = ([*chain.from_iterable(each["copies"][index] for each in measured)] for index in (0, 1))
    size = measured[0]["copies"][2]
    against = f"plain copies of a shard, {RANKS} processes, {size:.1f} MB, {1e3 * Spread.of(plain).median:.2f} ms"
    yield Row("Guardian save + restore, FSDP2", against, TIMES, ratio(ours, plain), 1.1)
    blocked, copied, with_checkpoint, without_checkpoint = (
        [*chain.from_iterable(each["checkpoints"][index] for each in measured)] for index in range(4)
    )
    against = f"a copy of a shard, {RANKS} processes, {1e3 * Spread.of(copied).median:.1f} ms"
    yield Row("Loop blocked by a checkpoint, FSDP2", against, TIMES, ratio(blocked, copied), 1.2)
    interval = INTERVAL / WINDOW * Spread.of(without_checkpoint).median
    slower = [(one - other) / interval for one, other in zip(with_checkpoint, without_checkpoint, strict=True)]
    against = f"{INTERVAL} steps, {RANKS} processes on the cores of this machine, {interval:.1f} s, wall clock"
    yield Row(f"A checkpoint every {INTERVAL} steps, FSDP2", against, PERCENT, Spread.of(slower), 0.01)


def _measured(effort: Effort) -> dict[str, Any]:
    found = Measured(large_shards(effort))
    agreements, copies = _agreements(effort.times(60)), on_a_shard(effort)
    found.train(effort.times(6))
    checkpoints = found.blocked, found.copied, found.with_checkpoint, found.without_checkpoint
    return {"agreements": agreements, "copies": copies, "checkpoints": checkpoints}


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
