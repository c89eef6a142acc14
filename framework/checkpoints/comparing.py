"""Where two runs part: the first step and tensor at which their checkpoints differ in any bit."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import listed
from ..state import ON_DEMAND, in_bytes, local_shards
from .format import intact_in

Moment = tuple[int, int]
"""Epoch and step of a checkpoint: at the end of an epoch there may be one before and one after its evaluation."""


@dataclass(frozen=True)
class Parting:
    """The first moment at which two runs differ, and what differs there."""

    epoch: int
    step: int
    names: Sequence[str]

    def __str__(self) -> str:
        """Return the words that end a sentence."""
        return f"at step {self.step:,} (epoch {self.epoch}), first in {listed(self.names, 1)}"


def moments_of(folder: Path) -> dict[Moment, Path]:
    """Return the checkpoints in a folder that are intact, by their moments, the earliest first."""
    of_runs = [each for each in intact_in(folder) if "epoch" in each.manifest]  # not those of somebody's own loop
    return {(each.manifest["epoch"], each.step): each.folder for each in of_runs}


def differing(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """Name the entries of two contents of checkpoints that differ in any bit, in their order.

    What the loop keeps only because a hook asked for it, and what hooks remember, is left out: the rest is the same in
    every run, with whatever hooks.
    """
    left, right = dict(_entries(a)), dict(_entries(b))
    return [name for name in {**left, **right} if not _same(left.get(name, _ABSENT), right.get(name, _ABSENT))]


_ABSENT = object()


def _entries(content: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield what the rest of a run depends on, by paths of names."""
    on_demand = tuple(f"loop/{item}" for item in ON_DEMAND)
    return ((name, value) for name, value in leaves(content.get("state")) if not name.startswith(on_demand))


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield what lies in nested mappings and lists, each with its path of names and numbers."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from leaves(item, f"{path}/{key}" if path else str(key))
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from leaves(item, f"{path}/{index}")
    else:
        yield path, value


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and a.dtype == b.dtype and torch.equal(_bits(a), _bits(b))
    if isinstance(a, float) and isinstance(b, float):
        return a.hex() == b.hex()
    return type(a) is type(b) and bool(a == b)


def _bits(tensor: Tensor) -> Tensor:
    return in_bytes(local_shards([tensor])[0])
