"""Bitwise comparison of two runs: the first step and tensor at which their checkpoints differ."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import listed
from ..state import without_on_demand
from ..tensors import in_bytes, local_shards
from .format import intact_checkpoints

Moment = tuple[int, int]
"""Epoch and step of a checkpoint. One step may have two checkpoints: before and after the evaluation of its epoch."""


@dataclass(frozen=True)
class Divergence:
    """The first moment at which two runs differ, and the names of the entries that differ there."""

    epoch: int
    step: int
    names: Sequence[str]

    def __str__(self) -> str:
        """Return the end of a sentence, such as ``at step 4 (epoch 1), first in parameters/0.weight``."""
        return f"at step {self.step:,} (epoch {self.epoch}), first in {listed(self.names, 1)}"


def checkpoints_by_moment(folder: Path) -> dict[Moment, Path]:
    """Return the folders of a run's intact checkpoints by epoch and step, oldest first."""
    # Checkpoints of custom training loops have no epoch in their manifests.
    of_runs = [checkpoint for checkpoint in intact_checkpoints(folder) if "epoch" in checkpoint.manifest]
    return {(checkpoint.manifest["epoch"], checkpoint.step): checkpoint.folder for checkpoint in of_runs}


def differing_entries(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """Return the names of the state entries in which two checkpoints differ in any bit, in stored order.

    The comparison leaves out the states of hooks and the loop values that are kept only at a hook's request. The
    remaining entries do not depend on which hooks ran.
    """
    left, right = [without_on_demand(dict(leaf_values(content.get("state")))) for content in (a, b)]
    return [name for name in {**left, **right} if not _same(left.get(name, _ABSENT), right.get(name, _ABSENT))]


_ABSENT = object()


def leaf_values(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaf values of nested mappings and sequences, each with its path of keys and indices."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from leaf_values(item, f"{path}/{key}" if path else str(key))
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from leaf_values(item, f"{path}/{index}")
    else:
        yield path, value


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and a.dtype == b.dtype and torch.equal(_bits(a), _bits(b))
    if isinstance(a, float) and isinstance(b, float):  # compared by bits: NaN equals NaN, 0.0 differs from -0.0
        return a.hex() == b.hex()
    return type(a) is type(b) and bool(a == b)


def _bits(tensor: Tensor) -> Tensor:
    return in_bytes(local_shards([tensor])[0])
