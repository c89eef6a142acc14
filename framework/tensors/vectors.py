"""Vectors over dicts of parameters: dot products, norms, cosines and linear combinations.

A missing name stands for zeros. All results are detached. Reductions are in the widest dtype of the device, usually
float64, and right for all magnitudes; those of DTensors are over the device mesh, so that every rank gets the same
number.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .reductions import cosine_of, in_range, inner_products, joint_norm_of, norms_of
from .shards import Groups, any_sharded, is_sharded, local_shards, over_shards, part_on_rank

Vector = Mapping[str, Tensor]
WIDE = frozenset({torch.float32, torch.float64})


@torch.no_grad()
def dot(a: Vector, b: Vector) -> Tensor:
    """Return the inner product of two vectors, zero-dimensional."""
    return _dot([(a[name], b[name]) for name in a if name in b])


@torch.no_grad()
def norm(a: Vector) -> Tensor:
    """Return the Euclidean norm of a vector, zero-dimensional."""
    return joint_norm(list(a.values()))


def joint_norm(tensors: list[Tensor]) -> Tensor:
    """Return the Euclidean norm of tensors taken together, zero-dimensional.

    Equals ``torch.nn.utils.get_total_norm`` for plain float32 and float64 tensors wherever that is accurate.
    """
    # torch._foreach_norm returns the norms of a DTensor's local shards, without communication.
    if any_sharded(tensors):
        return _dot(list(zip(tensors, tensors, strict=True))).sqrt()
    return joint_norm_of([tensor.detach() for tensor in tensors])


@torch.no_grad()
def norm_of_each(vector: Vector) -> dict[str, Tensor]:
    """Return the Euclidean norm of every tensor by its name, zero-dimensional each."""
    if any_sharded(vector.values()):
        return dict(zip(vector, norms(vector.values()).unbind(), strict=True))
    return dict(zip(vector, norms_of(list(vector.values())).unbind(), strict=True))


@torch.no_grad()
def norms(tensors: Iterable[Tensor]) -> Tensor:
    """Return the Euclidean norms of tensors, shape (tensors,); shards need one all-reduce.

    Tensors are processed one after the other, so that an iterator may create them lazily.
    """
    groups: Groups = {}
    parts = (part_on_rank(tensor, position, groups) for position, tensor in enumerate(tensors))
    all_norms = _stacked([norms_of([part])[0] for part in parts])
    # ||t|| = sqrt(sum over shards s of ||s||**2)
    return over_shards(all_norms.square(), groups).sqrt() if groups else all_norms


@torch.no_grad()
def max_abs(a: Vector) -> Tensor:
    """Return the largest absolute value of a vector's elements, zero for none; zero-dimensional."""
    groups: Groups = {}
    largest = _stacked([_max_abs(part_on_rank(tensor, position, groups)) for position, tensor in enumerate(a.values())])
    return over_shards(largest, groups, largest=True).max() if a else largest.sum()


def _max_abs(tensor: Tensor) -> Tensor:
    """Return the largest absolute value of one tensor's elements, zero for none."""
    sizes = _stored(tensor).abs()
    # amax() rejects a tensor without elements; the sum of none is zero.
    return _wide(sizes).amax() if sizes.numel() else _wide(sizes).sum()


def cosine(a: Vector, b: Vector) -> Tensor:
    """Return the cosine between two vectors, a·b / (||a|| ||b||); NaN if one of them is zero."""
    a, b = (dict(zip(vector, in_range(*vector.values()), strict=True)) for vector in (a, b))
    return cosine_of(dot(a, b), dot(a, a), dot(b, b))


@torch.no_grad()
def axpy(scale: float | Tensor, x: Vector, y: Vector) -> dict[str, Tensor]:
    """Return ``scale * x + y`` as new tensors."""
    # A zero-dimensional scale widens zero-dimensional tensors, and only these, so ``scaled`` restores the dtype.
    terms = scaled(scale, x)
    total = {name: _plus(terms[name], value) if name in x else value.clone() for name, value in y.items()}
    return total | {name: value for name, value in terms.items() if name not in y}


def _plus(a: Tensor, b: Tensor) -> Tensor:
    """Return the sum; torch adds a sparse tensor to a dense one, but not a dense one to a sparse one."""
    return b + a if a.is_sparse else a + b


def minus(a: Vector, b: Vector) -> dict[str, Tensor]:
    """Return ``a - b`` as new tensors."""
    return axpy(-1.0, b, a)


@torch.no_grad()
def scaled(scale: float | Tensor, x: Vector) -> dict[str, Tensor]:
    """Return ``scale * x`` as new tensors."""
    return {name: (scale * value).to(value.dtype) for name, value in x.items()}


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


def _stored(tensor: Tensor) -> Tensor:
    """Return the stored elements of a sparse tensor, which are all but zeros, and any other tensor itself."""
    return tensor.coalesce().values() if tensor.is_sparse else tensor


def _wide(tensor: Tensor) -> Tensor:
    # complex tensors stay: float() would discard the imaginary part
    return tensor if tensor.dtype in WIDE or tensor.is_complex() else tensor.float()


def _stacked(parts: Sequence[Tensor]) -> Tensor:
    """Stack zero-dimensional tensors on the device of the first one."""
    return torch.stack([part.to(parts[0].device) for part in parts]) if parts else torch.zeros(0)


def _dot(pairs: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    if not pairs:
        return torch.zeros((), dtype=torch.float64)
    groups: Groups = {}
    # a·b = sum over tensors and shards of Re(sum of a * conj(b)); one product for each tensor on this rank
    parts = [(part_on_rank(a, place, groups), part_on_rank(b, place, {}, a)) for place, (a, b) in enumerate(pairs)]
    return over_shards(inner_products(parts), groups).sum()


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
