"""Tensors and modules that are sharded over processes: DTensors, and what FSDP2 gathers and scatters."""

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


def dtensor_class() -> Any:
    """Return the DTensor class if this process has loaded it: a tensor of it cannot exist before."""
    module: Any = sys.modules.get("torch.distributed.tensor")
    return None if module is None else module.DTensor


def is_sharded(tensor: Tensor) -> bool:
    """Tell whether a tensor is a DTensor."""
    dtensor = dtensor_class()
    return dtensor is not None and isinstance(tensor, dtensor)


def is_partial(tensor: Tensor) -> bool:
    """Tell whether a tensor is a DTensor whose value is a sum over ranks that nobody has taken yet."""
    return is_sharded(tensor) and any(placement.is_partial() for placement in tensor.placements)  # type: ignore[attr-defined]


def local_shards(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return the tensors that hold the bytes on this rank: a DTensor's local shard, any other tensor itself."""
    dtensor = dtensor_class()
    if dtensor is None:
        return list(tensors)
    with torch.no_grad():
        return [tensor.to_local() if isinstance(tensor, dtensor) else tensor for tensor in tensors]  # type: ignore[attr-defined]


def whole(value: Tensor) -> Tensor:
    """Return the whole of a sharded DTensor, the reduced value of a partial one, any other tensor itself."""
    dtensor = dtensor_class()
    if dtensor is not None and isinstance(value, dtensor):
        return value.full_tensor()  # type: ignore[attr-defined, no-any-return]
    return value


def fully_sharded_modules(model: nn.Module) -> list[Any]:
    """Return the modules that FSDP2 (``fully_shard``) gathers before their forward and scatters after backward."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    return [] if fsdp is None else [module for module in model.modules() if isinstance(module, fsdp.FSDPModule)]


def finish_sharding(modules: list[Any]) -> None:
    """Let FSDP2 register now what it registers on modules at their first forward, so that no rollback undoes it."""
    for module in modules:
        module._get_fsdp_state()._lazy_init()


@contextmanager
def gathered_for_a_while(model: nn.Module) -> Iterator[None]:
    """Scatter what FSDP2 gathered for a forward without backward: its root would go on with the gathered copy.

    Left alone, that copy would replace the sharded parameters in ``model.parameters()``, and the next forward would
    use it whatever the optimizer did to the shards in between.
    """
    try:
        yield
    finally:
        for module in fully_sharded_modules(model):
            module.reshard()
