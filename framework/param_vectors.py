"""Vectors over dicts of parameters: local shards, dot products, norms, cosines, linear combinations."""

import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

Vector = Mapping[str, Tensor]


def _dtensor_class() -> Any:
    """Return the DTensor class if this process has loaded it: a tensor of it cannot exist before."""
    module = sys.modules.get("torch.distributed.tensor")
    return None if module is None else module.DTensor


def local_shards(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return the tensors that hold the bytes on this rank: a DTensor's local shard, any other tensor itself."""
    dtensor = _dtensor_class()
    if dtensor is None:
        return list(tensors)
    with torch.no_grad():
        return [tensor.to_local() if isinstance(tensor, dtensor) else tensor for tensor in tensors]  # type: ignore[attr-defined]


def _global_sum(value: Tensor) -> Tensor:
    """Return a sum over ranks where ``value`` is a partial or sharded DTensor, ``value`` itself elsewhere."""
    dtensor = _dtensor_class()
    if dtensor is not None and isinstance(value, dtensor):
        return value.full_tensor()  # type: ignore[attr-defined, no-any-return]
    return value


def dot(a: Vector, b: Vector) -> Tensor:
    """Return the inner product of two vectors over the same names, reduced in float32 or wider; zero-dimensional.

    Shards are reduced over their mesh, so that every rank holds the same number.
    """
    parts = [_global_sum((_wide(a[name]) * _wide(b[name])).sum()) for name in a]
    return torch.stack(parts).sum() if parts else torch.zeros(())


def norm(a: Vector) -> Tensor:
    """Return the Euclidean norm of a vector, reduced in float32 or wider; zero-dimensional."""
    if not a:
        return torch.zeros(())
    tensors = list(a.values())
    dtensor = _dtensor_class()
    if dtensor is None or not any(isinstance(tensor, dtensor) for tensor in tensors):
        return torch.linalg.vector_norm(torch.stack(torch._foreach_norm([_wide(tensor) for tensor in tensors])))
    return dot(a, a).sqrt()


def cosine(a: Vector, b: Vector) -> Tensor:
    """Return the cosine between two vectors; NaN where one of them is zero, since the angle is undefined there."""
    return dot(a, b) / (norm(a) * norm(b))


def axpy(scale: float | Tensor, x: Vector, y: Vector) -> dict[str, Tensor]:
    """Return ``scale * x + y`` as new tensors."""
    return {name: scale * x[name] + y[name] for name in y}


def scaled(scale: float | Tensor, x: Vector) -> dict[str, Tensor]:
    """Return ``scale * x`` as new tensors."""
    return {name: scale * value for name, value in x.items()}


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Return the live gradients by parameter name, leaving out parameters without one."""
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def copied(vector: Vector) -> dict[str, Tensor]:
    """Return an independent copy, detached."""
    return {name: value.detach().clone() for name, value in vector.items()}


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that are trained, by name, each shared parameter once."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
