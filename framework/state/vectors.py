"""Vectors over dicts of parameters: dot products, norms, cosines, linear combinations, and their shards.

A name that a vector lacks stands for zeros. Everything returned is detached. Reductions are in float32 or wider, and
over the mesh where tensors are DTensors, so that every rank holds the same number.
"""

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

Vector = Mapping[str, Tensor]
Groups = dict[Any, list[int]]
"""The places of those tensors that lie in parts on the ranks of a process group."""
WIDE = frozenset({torch.float32, torch.float64})


def dtensor_class() -> Any:
    """Return the DTensor class if this process has loaded it: a tensor of it cannot exist before."""
    # Looked up, since importing it takes a second and most runs never need it.
    module: Any = sys.modules.get("torch.distributed.tensor")
    return None if module is None else module.DTensor


def is_sharded(tensor: Tensor) -> bool:
    """Return whether a tensor is a DTensor."""
    dtensor = dtensor_class()
    return dtensor is not None and isinstance(tensor, dtensor)


def is_partial(tensor: Tensor) -> bool:
    """Return whether a tensor is a DTensor whose value is a sum over ranks that has not been taken yet."""
    return is_sharded(tensor) and any(placement.is_partial() for placement in tensor.placements)  # type: ignore[attr-defined]


def local_shards(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return the tensors that hold the bytes on this rank: a DTensor's local shard, any other tensor itself."""
    dtensor = dtensor_class()
    if dtensor is None:
        return list(tensors)
    # not by to_local(), which makes a new object for a parameter at every call
    return [tensor._local_tensor if isinstance(tensor, dtensor) else tensor for tensor in tensors]  # type: ignore[attr-defined]


def unsharded(value: Tensor) -> Tensor:
    """Return the whole of a sharded DTensor, the reduced value of a partial one, any other tensor itself."""
    dtensor = dtensor_class()
    if dtensor is not None and isinstance(value, dtensor):
        return value.full_tensor()  # type: ignore[attr-defined, no-any-return]
    return value


def laid_out_like(tensor: Any, owner: Any) -> Any:
    """Return a DTensor, or a tensor that every rank has whole, in the layout of the parameter that it belongs to."""
    if not is_sharded(owner):
        return tensor
    mesh = owner.device_mesh
    if not is_sharded(tensor):
        module: Any = sys.modules["torch.distributed.tensor"]
        tensor = module.DTensor.from_local(tensor, mesh, [module.Replicate()] * mesh.ndim, run_check=False)
    return tensor.redistribute(mesh, owner.placements)


def completed(tensor: Any) -> Tensor:
    """Return a DTensor whose value is no sum over ranks that is still to be taken; any other tensor itself."""
    return tensor.redistribute(tensor.device_mesh, _complete(tensor)) if is_partial(tensor) else tensor  # type: ignore[no-any-return]


def _complete(tensor: Any) -> list[Any]:
    """Return the placements of a DTensor, a sum over ranks that is still to be taken replaced by the taken one."""
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

    Bit for bit that of ``torch.nn.utils.get_total_norm`` for plain float32 and float64 tensors; float16 and bfloat16
    are reduced in float32, since a float16 norm overflows at 65504.
    """
    if any(map(is_sharded, tensors)):
        return _dot(zip(tensors, tensors, strict=True)).sqrt()
    if not tensors:
        return torch.zeros(())
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
    """Return the Euclidean norms of tensors, shape (tensors,), in float32 or wider; of shards by one all-reduce.

    One tensor is taken after another, so that they may be made on the way.
    """
    groups: Groups = {}
    found = _stacked([_norms([_part(tensor, place, groups)])[0] for place, tensor in enumerate(tensors)])
    return over_shards(found.double().square(), groups).sqrt().to(found.dtype) if groups else found


def _norms(tensors: list[Tensor]) -> list[Tensor]:
    """Return the Euclidean norms of plain tensors, those of lower precision than float32 reduced in float32."""
    if any(tensor.dtype not in WIDE for tensor in tensors):
        tensors = [_wide(tensor) for tensor in tensors]
    # torch has no public foreach functions; its optimizers and clip_grad_norm_ are built on these.
    return list(torch._foreach_norm(tensors))


@torch.no_grad()
def max_abs(a: Vector) -> Tensor:
    """Return the largest absolute value of a vector's elements, zero for none; zero-dimensional."""
    groups: Groups = {}
    parts = [_part(tensor, place, groups).abs() for place, tensor in enumerate(a.values())]
    largest = _stacked([_wide(part).amax() if part.numel() else _wide(part).sum() for part in parts])
    return over_shards(largest, groups, largest=True).max() if parts else largest.sum()


def cosine(a: Vector, b: Vector) -> Tensor:
    """Return the cosine between two vectors; NaN where one of them is zero, since the angle is undefined there."""
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
    """Return ``total + weight * vector`` in float32 or wider, in the tensors of ``total`` where both have a name."""
    grown = dict(total or {})
    shared = [name for name in vector if name in grown]
    if shared:
        sums, terms = [grown[name] for name in shared], [vector[name] for name in shared]
        terms = [_as_laid_out(term, total) for term, total in zip(terms, sums, strict=True)]
        torch._foreach_add_(local_shards(sums), local_shards(terms), alpha=weight)
    grown |= {name: _wide(value) * weight for name, value in vector.items() if name not in grown}
    return grown


def _as_laid_out(tensor: Any, like: Any) -> Any:
    """Return a DTensor as another one lies: what a checkpoint gave back may lie otherwise than what backward gives."""
    same = not is_sharded(like) or not is_sharded(tensor) or tensor.placements == like.placements
    return tensor if same else tensor.redistribute(like.device_mesh, like.placements)


@torch.no_grad()
def overwrite(targets: Vector, values: Vector) -> None:
    """Copy every tensor of ``values`` into the target of its name, in place."""
    if values:
        torch._foreach_copy_(local_shards([targets[name] for name in values]), local_shards(values.values()))


def widened(vector: Vector) -> dict[str, Tensor]:
    """Return a vector in float32 or wider: its own tensors where they are."""
    return {name: _wide(value) for name, value in vector.items()}


def _wide(tensor: Tensor) -> Tensor:
    # a complex number has a type of its own in either width, and float() would take its real part
    return tensor if tensor.dtype in WIDE or tensor.is_complex() else tensor.float()


def _plain_dot(a: Tensor, b: Tensor) -> Tensor:
    return (_wide(a) * _wide(b).conj()).real.sum()


def _stacked(parts: Sequence[Tensor]) -> Tensor:
    """Stack zero-dimensional tensors of any devices, on the first one's."""
    return torch.stack([part.to(parts[0].device) for part in parts]) if parts else torch.zeros(0)


def _dot(pairs: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
    groups: Groups = {}
    found = [_plain_dot(_part(a, place, groups), _part(b, place, {}, a)) for place, (a, b) in enumerate(pairs)]
    return over_shards(_stacked(found), groups).sum()


def _part(tensor: Any, place: int, groups: Groups, like: Any = None) -> Tensor:
    """Return what this rank has of a tensor, laid out as another one, and note in ``groups`` who has the rest."""
    like = tensor if like is None else like
    if not is_sharded(like):
        return tensor  # type: ignore[no-any-return]
    # A partial sum must be completed before it is multiplied: a product of sums is no sum of products.
    placements = _complete(like)
    for dimension, placement in enumerate(placements):
        if not placement.is_replicate():  # not is_shard, which the strided shards of FSDP2 on other shards are not
            groups.setdefault(like.device_mesh.get_group(dimension), []).append(place)
    return tensor.redistribute(like.device_mesh, placements).to_local()  # type: ignore[no-any-return]


@torch.no_grad()
def groups_of(tensors: Iterable[Tensor]) -> Groups:
    """Return, for every process group, the places of the tensors that lie in parts on its ranks."""
    groups: Groups = {}
    for place, tensor in enumerate(tensors):
        _part(tensor, place, groups)
    return groups


def over_shards(values: Tensor, groups: Groups, *, largest: bool = False) -> Tensor:
    """Combine numbers of tensors, in the last dimension, over the ranks that have parts of them; overwrites them.

    They are added up, or the ``largest`` is taken (NaN where there is one), by one all-reduce for each process group of
    :func:`groups_of`.
    """
    for group, places in groups.items():
        chosen = values[..., places]
        if largest:  # the backends disagree about the larger of a number and NaN
            chosen = torch.stack([chosen.nan_to_num(-torch.inf, torch.inf, -torch.inf), chosen.isnan().to(chosen)])
        operation = torch.distributed.ReduceOp.MAX if largest else torch.distributed.ReduceOp.SUM
        torch.distributed.all_reduce(chosen, op=operation, group=group)
        values[..., places] = torch.where(chosen[1] > 0, torch.nan, chosen[0]) if largest else chosen
    return values


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Return the live gradients by parameter name, leaving out parameters without one."""
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def live_gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """Return the live gradients in order, leaving out parameters without one."""
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def copied(vector: Vector) -> dict[str, Tensor]:
    """Return an independent copy, detached."""
    return {name: value.detach().clone() for name, value in vector.items()}


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that are trained, by name, each shared parameter once."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
