"""Runs something on several processes that form a gloo group."""

import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.spawn import start_processes

from tests.support.processes import fork_server

TIMEOUT = 60
"""Seconds after which a rank that waits for others in vain raises, rather than hang the suite."""


def on_ranks(compute: Callable[[], Any], folder: Path, count: int) -> list[Any]:
    """Return what ``compute``, a function of a module, returns on each rank: tensors and plain values."""
    started = start_on_ranks(compute, folder, count)
    while not started.join():  # returns where some have ended
        pass
    return [torch.load(folder / f"{rank}.pt") for rank in range(count)]


def start_on_ranks(compute: Callable[[], Any], folder: Path, count: int) -> Any:
    """Start the ranks, each of which saves what it returns in a file ``RANK.pt`` of the folder.

    They are forked from a process that has imported everything and done nothing, which is far quicker than an import.
    """
    fork_server()
    # The server keeps the environment that it was started in, and tests change theirs.
    return start_processes(
        _be_one, (compute, folder, count, dict(os.environ)), count, join=False, start_method="forkserver"
    )


def on_two_ranks(compute: Callable[[], Any], folder: Path) -> list[Any]:
    """Return what ``compute`` returns on each of two ranks."""
    return on_ranks(compute, folder, 2)


def _be_one(rank: int, compute: Callable[[], Any], folder: Path, count: int, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=count, timeout=timedelta(seconds=TIMEOUT)
    )
    torch.save(compute(), folder / f"{rank}.pt")
    ends = time.monotonic() + TIMEOUT
    while time.monotonic() < ends and not all((folder / f"{each}.pt").exists() for each in range(count)):
        time.sleep(0.01)
    # Nothing is torn down: threads of gloo that outlive their group, or whose peer has gone, abort an interpreter that
    # ends, now and then.
    os._exit(0)
