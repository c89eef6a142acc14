"""Runs something on several processes that form a gloo group."""

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

TIMEOUT = 60
"""Seconds after which a rank that waits for others in vain raises, rather than hang the suite."""


def on_ranks(compute: Callable[[], Any], folder: Path, count: int) -> list[Any]:
    """Return what ``compute``, a function of a module, returns on each rank: tensors and plain values."""
    started = start_on_ranks(compute, folder, count)
    while not started.join():  # returns where some have ended
        pass
    return [torch.load(folder / f"{rank}.pt") for rank in range(count)]


def start_on_ranks(compute: Callable[[], Any], folder: Path, count: int) -> Any:
    """Start the ranks, each of which saves what it returns in a file ``RANK.pt`` of the folder."""
    return torch.multiprocessing.spawn(_be_one, args=(compute, folder, count), nprocs=count, join=False)


def on_two_ranks(compute: Callable[[], Any], folder: Path) -> list[Any]:
    """Return what ``compute`` returns on each of two ranks."""
    return on_ranks(compute, folder, 2)


def _be_one(rank: int, compute: Callable[[], Any], folder: Path, count: int) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=count, timeout=timedelta(seconds=TIMEOUT)
    )
    torch.save(compute(), folder / f"{rank}.pt")
    torch.distributed.destroy_process_group()
    os._exit(0)  # threads of gloo that outlive their group abort an interpreter that ends, now and then
