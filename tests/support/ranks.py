"""Functions run on several processes that form a gloo group."""

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
"""Seconds after which a waiting rank raises, so that a lost rank cannot hang the suite."""


def on_ranks(compute: Callable[[], Any], folder: Path, count: int) -> list[Any]:
    """Return the result of ``compute``, a module-level function, on each rank: tensors and plain values."""
    started = start_on_ranks(compute, folder, count)
    while not started.join():  # returns as soon as any process has ended
        pass
    return [torch.load(folder / f"{rank}.pt") for rank in range(count)]


def start_on_ranks(compute: Callable[[], Any], folder: Path, count: int) -> Any:
    """Start the ranks, each of which saves its result in the file ``RANK.pt`` of the folder.

    They are forked from a process that has imported everything and run nothing, which is much faster than an import.
    """
    fork_server()
    # The server keeps its original environment, while tests change theirs.
    return start_processes(
        _run_rank, (compute, folder, count, dict(os.environ)), count, join=False, start_method="forkserver"
    )


def on_two_ranks(compute: Callable[[], Any], folder: Path) -> list[Any]:
    """Return the results of ``compute`` on two ranks."""
    return on_ranks(compute, folder, 2)


def _run_rank(rank: int, compute: Callable[[], Any], folder: Path, count: int, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=count, timeout=timedelta(seconds=TIMEOUT)
    )
    torch.save(compute(), folder / f"{rank}.pt")
    deadline = time.monotonic() + TIMEOUT
    while time.monotonic() < deadline and not all(
        (folder / f"{other_rank}.pt").exists() for other_rank in range(count)
    ):
        time.sleep(0.01)
    # The process skips the interpreter's shutdown, which gloo threads occasionally abort if they outlive their group or
    # lose their peer.
    os._exit(0)
