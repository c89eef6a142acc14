"""Runs something on two processes that form a gloo group."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def on_two_ranks(compute: Callable[[], Any], folder: Path) -> list[Any]:
    """Return what ``compute``, a function of a module, returns on each of two ranks: tensors and plain values."""
    torch.multiprocessing.spawn(_be_one, args=(compute, folder), nprocs=2)
    return [torch.load(folder / f"{rank}.pt") for rank in (0, 1)]


def _be_one(rank: int, compute: Callable[[], Any], folder: Path) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    torch.save(compute(), folder / f"{rank}.pt")
    torch.distributed.destroy_process_group()
