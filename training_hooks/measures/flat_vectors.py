"""Vectors over a model's parameters as one flat tensor, for methods that keep many of them."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from loopscope.state import WIDE, Vector, is_sharded, whole
from torch import Tensor


@dataclass(frozen=True)
class FlatSpace:
    """The space of vectors over ``parameters``, flattened in their order, in float32 (float64 if one of them is).

    A flat vector holds the whole of sharded parameters, on every rank.
    """

    parameters: Mapping[str, Tensor]

    @cached_property
    def size(self) -> int:
        """The number n of elements."""
        return sum(value.numel() for value in self.parameters.values())

    @cached_property
    def dtype(self) -> torch.dtype:
        """The dtype of flat vectors."""
        widest = max((value.dtype for value in self.parameters.values()), key=lambda dtype: dtype.itemsize)
        return widest if widest in WIDE else torch.float32

    @torch.no_grad()
    def flat(self, vector: Vector) -> Tensor:
        """Return a vector as one tensor, shape (n,); names that it lacks are zeros."""
        named = self.parameters.items()
        parts = [whole(vector[name] if name in vector else torch.zeros_like(value)) for name, value in named]
        return torch.cat([part.reshape(-1).to(self.dtype) for part in parts])

    @torch.no_grad()
    def vector(self, flat: Tensor) -> dict[str, Tensor]:
        """Return a flat tensor as a vector: views of it for plain parameters, shards for sharded ones."""
        pieces = torch.split(flat, [value.numel() for value in self.parameters.values()])
        return {
            name: _placed_as(value, piece.view(value.shape))
            for (name, value), piece in zip(self.parameters.items(), pieces, strict=True)
        }


def _placed_as(parameter: Any, value: Tensor) -> Tensor:
    if not is_sharded(parameter):
        return value
    module: Any = sys.modules["torch.distributed.tensor"]
    mesh = parameter.device_mesh
    replicated = module.DTensor.from_local(value, mesh, [module.Replicate()] * mesh.ndim, run_check=False)
    placed: Tensor = replicated.redistribute(mesh, parameter.placements)
    return placed
