"""Tensors whose shards are on several ranks (DTensors, FSDP2): layouts, shards, and sums over shards."""

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import repeat
from typing import Any, Protocol

import torch
from torch import Tensor, nn


class HasModules(Protocol):
    """A module, or a group of modules."""

    def modules(self) -> Iterator[nn.Module]:
        """Yield all modules."""


Groups = dict[Any, list[int]]
"""For each process group, the positions of the tensors that are sharded over its ranks."""


def dtensor_class() -> Any:
    """Return the DTensor class if this process has imported it; otherwise no DTensor can exist."""
    # Read from sys.modules, since importing it takes a second and most runs do not need it.
    module: Any = sys.modules.get("torch.distributed.tensor")
    return None if module is None else module.DTensor


def is_sharded(tensor: Tensor) -> bool:
    """Return whether a tensor is a DTensor."""
    dtensor = dtensor_class()
    return dtensor is not None and isinstance(tensor, dtensor)


def any_sharded(tensors: Iterable[Tensor]) -> bool:
    """Return whether one of several tensors is a DTensor."""
    dtensor = dtensor_class()
    return dtensor is not None and any(map(isinstance, tensors, repeat(dtensor)))


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
    return replicated_like(tensor, owner).redistribute(owner.device_mesh, owner.placements)


def replicated_like(tensor: Any, owner: Any) -> Any:
    """Return a tensor that is equal on all ranks as a DTensor if ``owner`` is one, without sharding it."""
    if not is_sharded(owner) or is_sharded(tensor):
        return tensor
    module: Any = sys.modules["torch.distributed.tensor"]
    placements = [module.Replicate()] * owner.device_mesh.ndim
    # run_check would communicate to make the ranks equal; the caller promises that they are.
    return module.DTensor.from_local(tensor, owner.device_mesh, placements, run_check=False)


def completed(tensor: Any) -> Tensor:
    """Return a DTensor with its pending sums over ranks completed; any other tensor itself."""
    return tensor.redistribute(tensor.device_mesh, completed_placements(tensor)) if is_partial(tensor) else tensor  # type: ignore[no-any-return]


def completed_placements(tensor: Any) -> list[Any]:
    """Return the placements of a DTensor, with pending sums over ranks replaced by replication."""
    replicate = sys.modules["torch.distributed.tensor"].Replicate
    return [replicate() if placement.is_partial() else placement for placement in tensor.placements]


def part_on_rank(tensor: Any, position: int, groups: Groups, like: Any = None) -> Tensor:
    """Return this rank's part of a tensor in the layout of ``like``, and add the process groups to ``groups``."""
    like = tensor if like is None else like
    if not is_sharded(like):
        return tensor  # type: ignore[no-any-return]
    # Partial sums are completed before they are multiplied: a product of sums is not the sum of products.
    placements = completed_placements(like)
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
        part_on_rank(tensor, position, groups)
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


def fully_sharded_modules(model: HasModules) -> list[Any]:
    """Return the modules under FSDP2 (``fully_shard``), which gathers their parameters for forward and backward."""
    # Without this module, fully_shard cannot have been called.
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    return [] if fsdp is None else [module for module in model.modules() if isinstance(module, fsdp.FSDPModule)]


@contextmanager
def resharded_afterwards(model: HasModules) -> Iterator[None]:
    """Reshard all modules after the body, since a forward pass without backward leaves parameters gathered.

    Otherwise ``model.parameters()`` would return the gathered copy, and the next forward pass would use it instead of
    the shards that the optimizer has updated.
    """
    try:
        yield
    finally:
        for module in fully_sharded_modules(model):
            module.reshard()
