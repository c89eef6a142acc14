"""Vectors over dicts of parameters: dot products, norms, cosines, linear combinations, and their shards.

A missing name stands for zeros. All results are detached. Reductions are in float32 or wider; those of DTensors are
over the device mesh, so that every rank gets the same number.
"""

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

Vector = Mapping[str, Tensor]
Groups = dict[Any, list[int]]
"""For each process group, the positions of the tensors that are sharded over its ranks."""
WIDE = frozenset({torch.float32, torch.float64})


def dtensor_class() -> Any:
    """Return the DTensor class if this process has imported it; otherwise no DTensor can exist."""
    # Read from sys.modules, since importing it takes a second and most runs do not need it.
    module: Any = sys.modules.get("torch.distributed.tensor")
    return None if module is None else module.DTensor


def is_sharded(tensor: Tensor) -> bool:
    """Return whether a tensor is a DTensor."""
    dtensor = dtensor_class()
    return dtensor is not None and isinstance(tensor, dtensor)


def is_partial(tensor: Tensor) -> bool:
    """Return whether a tensor is a DTensor with a pending sum over ranks."""
    return is_sharded(tensor) and any(placement.is_partial() for placement in tensor.placements)  # type: ignore[attr-defined]


def local_shards(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return the tensors with the bytes on this rank: a DTensor's local shard, any other tensor itself."""
    dtensor = dtensor_class()
    if dtensor is None:
        return list(tensors)
    # private, since to_local() creates a new object for a parameter at every call
    return [tensor._local_tensor if isinstance(tensor, dtensor) else tensor for tensor in tensors]  # type: ignore[attr-defined]


def unsharded(value: Tensor) -> Tensor:
    """Return the full tensor of a DTensor, with pending sums completed, and any other tensor itself."""
    dtensor = dtensor_class()
    if dtensor is not None and isinstance(value, dtensor):
        return value.full_tensor()  # type: ignore[attr-defined, no-any-return]
    return value


def laid_out_like(tensor: Any, owner: Any) -> Any:
    """Return a DTensor, or a tensor that is equal on all ranks, in the layout of its parameter ``owner``."""
    if not is_sharded(owner):
        return tensor
    mesh = owner.device_mesh
    if not is_sharded(tensor):
        module: Any = sys.modules["torch.distributed.tensor"]
        # run_check would communicate to make the ranks equal; the caller promises that they are.
        tensor = module.DTensor.from_local(tensor, mesh, [module.Replicate()] * mesh.ndim, run_check=False)
    return tensor.redistribute(mesh, owner.placements)


def completed(tensor: Any) -> Tensor:
    """Return a DTensor with its pending sums over ranks completed; any other tensor itself."""
    return tensor.redistribute(tensor.device_mesh, _completed_placements(tensor)) if is_partial(tensor) else tensor  # type: ignore[no-any-return]


def _completed_placements(tensor: Any) -> list[Any]:
    """Return the placements of a DTensor, with pending sums over ranks replaced by replication."""
    replicate = sys.modules["torch.distributed.tensor"].Replicate
    return [replicate() if placement.is_partial() else placement for placement in tensor.placements]


@torch.no_grad()
def dot(a: Vector, b: Vector) -> Tensor:
    """Return the inner product of two vectors, zero-dimensional."""
    return _dot((a[name], b[name]) for name in a if name in b)


@torch.no_grad()
def norm(a: Vector) -> Tensor:
    """Return the Euclidean norm of a vector, zero-dimensional."""
    return joint_norm(list(a.values()))


def joint_norm(tensors: list[Tensor]) -> Tensor:
    """Return the Euclidean norm of tensors taken together, zero-dimensional.

    Equals ``torch.nn.utils.get_total_norm`` bit for bit for plain float32 and float64 tensors. float16 and bfloat16 are
    reduced in float32, since a float16 norm overflows at 65504.
    """
    # torch._foreach_norm returns the norms of a DTensor's local shards, without communication.
    if any(map(is_sharded, tensors)):
        return _dot(zip(tensors, tensors, strict=True)).sqrt()
    if not tensors:
        return torch.zeros(())
    # ||(a, b, ...)|| = ||(||a||, ||b||, ...)||
    total: Tensor = torch.linalg.vector_norm(_stacked(_norms(tensors)))
    return total


@torch.no_grad()
def norm_of_each(vector: Vector) -> dict[str, Tensor]:
    """Return the Euclidean norm of every tensor by its name, reduced in float32 or wider; zero-dimensional each."""
    if any(map(is_sharded, vector.values())):
        return dict(zip(vector, norms(vector.values()).unbind(), strict=True))
    return dict(zip(vector, _norms(list(vector.values())), strict=True))


@torch.no_grad()
def norms(tensors: Iterable[Tensor]) -> Tensor:
    """Return the Euclidean norms of tensors, shape (tensors,), in float32 or wider; shards need one all-reduce.

    Tensors are processed one after the other, so that an iterator may create them lazily.
    """
    groups: Groups = {}
    all_norms = _stacked([_norms([_part(tensor, position, groups)])[0] for position, tensor in enumerate(tensors)])
    # ||t|| = sqrt(sum over shards s of ||s||**2), in float64, where the square of a float32 does not overflow
    return over_shards(all_norms.double().square(), groups).sqrt().to(all_norms.dtype) if groups else all_norms


def _norms(tensors: list[Tensor]) -> list[Tensor]:
    """Return the Euclidean norms of plain tensors, those of lower precision than float32 reduced in float32."""
    if any(tensor.dtype not in WIDE for tensor in tensors):
        tensors = [_wide(tensor) for tensor in tensors]
    # torch has no public foreach functions; its optimizers and clip_grad_norm_ use these private ones.
    return list(torch._foreach_norm(tensors))


@torch.no_grad()
def max_abs(a: Vector) -> Tensor:
    """Return the largest absolute value of a vector's elements, zero for none; zero-dimensional."""
    groups: Groups = {}
    parts = [_part(tensor, position, groups).abs() for position, tensor in enumerate(a.values())]
    # amax() rejects a tensor without elements; the sum of none is zero.
    largest = _stacked([_wide(part).amax() if part.numel() else _wide(part).sum() for part in parts])
    return over_shards(largest, groups, largest=True).max() if parts else largest.sum()


def cosine(a: Vector, b: Vector) -> Tensor:
    """Return the cosine between two vectors, a·b / (||a|| ||b||); NaN if one of them is zero."""
    return dot(a, b) / (dot(a, a).sqrt() * dot(b, b).sqrt())


@torch.no_grad()
def axpy(scale: float | Tensor, x: Vector, y: Vector) -> dict[str, Tensor]:
    """Return ``scale * x + y`` as new tensors."""
    total = {name: scale * x[name] + value if name in x else value.clone() for name, value in y.items()}
    return total | {name: scale * value for name, value in x.items() if name not in y}


def minus(a: Vector, b: Vector) -> dict[str, Tensor]:
    """Return ``a - b`` as new tensors."""
    return axpy(-1.0, b, a)


@torch.no_grad()
def scaled(scale: float | Tensor, x: Vector) -> dict[str, Tensor]:
    """Return ``scale * x`` as new tensors."""
    return {name: scale * value for name, value in x.items()}


@torch.no_grad()
def accumulate(total: Mapping[str, Tensor] | None, vector: Vector, weight: float = 1) -> dict[str, Tensor]:
    """Return ``total + weight * vector`` in float32 or wider; tensors of ``total`` are updated in place."""
    result = dict(total or {})
    shared = [name for name in vector if name in result]
    if shared:
        sums, terms = [result[name] for name in shared], [vector[name] for name in shared]
        terms = [_as_laid_out(term, total) for term, total in zip(terms, sums, strict=True)]
        torch._foreach_add_(local_shards(sums), local_shards(terms), alpha=weight)
    result |= {name: _wide(value) * weight for name, value in vector.items() if name not in result}
    return result


def _as_laid_out(tensor: Any, like: Any) -> Any:
    """Return a DTensor in the layout of ``like``: layouts from a checkpoint and from backward may differ."""
    same = not is_sharded(like) or not is_sharded(tensor) or tensor.placements == like.placements
    return tensor if same else tensor.redistribute(like.device_mesh, like.placements)


@torch.no_grad()
def overwrite(targets: Vector, values: Vector) -> None:
    """Copy every tensor of ``values`` into the target of its name, in place."""
    if values:
        # On the local shards, since _foreach_copy_ does not work on DTensors.
        torch._foreach_copy_(local_shards([targets[name] for name in values]), local_shards(values.values()))


def widened(vector: Vector) -> dict[str, Tensor]:
    """Return a vector in float32 or wider; wide tensors are not copied."""
    return {name: _wide(value) for name, value in vector.items()}


def _wide(tensor: Tensor) -> Tensor:
    # complex tensors stay: float() would discard the imaginary part
    return tensor if tensor.dtype in WIDE or tensor.is_complex() else tensor.float()


def _plain_dot(a: Tensor, b: Tensor) -> Tensor:
    return (_wide(a) * _wide(b).conj()).real.sum()  # Re(sum of a * conj(b)), also for complex tensors


def _stacked(parts: Sequence[Tensor]) -> Tensor:
    """Stack zero-dimensional tensors on the device of the first one."""
    return torch.stack([part.to(parts[0].device) for part in parts]) if parts else torch.zeros(0)


def _dot(pairs: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
    groups: Groups = {}
    # a·b = sum over tensors and shards of Re(sum of a * conj(b)); one product for each tensor on this rank
    products = [
        _plain_dot(_part(a, position, groups), _part(b, position, {}, a)) for position, (a, b) in enumerate(pairs)
    ]
    return over_shards(_stacked(products), groups).sum()


def _part(tensor: Any, position: int, groups: Groups, like: Any = None) -> Tensor:
    """Return this rank's part of a tensor in the layout of ``like``, and add the process groups to ``groups``."""
    like = tensor if like is None else like
    if not is_sharded(like):
        return tensor  # type: ignore[no-any-return]
    # Partial sums are completed before they are multiplied: a product of sums is not the sum of products.
    placements = _completed_placements(like)
    for dimension, placement in enumerate(placements):
        # is_shard() would be false for the strided shards of FSDP2 with tensor parallelism.
        if not placement.is_replicate():
            groups.setdefault(like.device_mesh.get_group(dimension), []).append(position)
    return tensor.redistribute(like.device_mesh, placements).to_local()  # type: ignore[no-any-return]


@torch.no_grad()
def groups_of(tensors: Iterable[Tensor]) -> Groups:
    """Return, for every process group, the positions of the tensors that are sharded over its ranks."""
    groups: Groups = {}
    for position, tensor in enumerate(tensors):
        _part(tensor, position, groups)
    return groups


def over_shards(values: Tensor, groups: Groups, *, largest: bool = False) -> Tensor:
    """Combine one number per tensor (last dimension of ``values``) over the ranks with shards of it, in place.

    The numbers are summed, or with ``largest`` their maximum is taken (NaN if any is NaN), by one all-reduce per
    process group of :func:`groups_of`.
    """
    for group, positions in groups.items():
        chosen = values[..., positions]
        if largest:  # backends disagree about the maximum of a number and NaN
            chosen = torch.stack([chosen.nan_to_num(-torch.inf, torch.inf, -torch.inf), chosen.isnan().to(chosen)])
        operation = torch.distributed.ReduceOp.MAX if largest else torch.distributed.ReduceOp.SUM
        torch.distributed.all_reduce(chosen, op=operation, group=group)
        values[..., positions] = torch.where(chosen[1] > 0, torch.nan, chosen[0]) if largest else chosen
    return values


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Return the live gradients by parameter name, without parameters that have none."""
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def live_gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """Return the live gradients in order, without parameters that have none."""
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def copied(vector: Vector) -> dict[str, Tensor]:
    """Return a detached copy of a vector."""
    return {name: value.detach().clone() for name, value in vector.items()}


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trainable parameters by name, each shared parameter once."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
