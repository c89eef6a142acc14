"""The bytes of tensors: inner tensors of wrappers, parts of sparse tensors, storages and views as bytes."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

PLAIN = frozenset({Tensor, nn.Parameter})
COMPRESSED = frozenset({torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc})
"""Layouts of sparse tensors that have no strides."""


def is_wrapper(tensor: Tensor) -> bool:
    """Return whether a tensor stores its bytes in inner tensors, as a DTensor does."""
    return type(tensor) not in PLAIN and is_traceable_wrapper_subclass(tensor)


def is_uninitialised(tensor: Tensor) -> bool:
    """Return whether a tensor of a lazy module has no shape and bytes yet; most of its methods raise."""
    return type(tensor) not in PLAIN and isinstance(tensor, UninitializedTensorMixin)


def inner_tensors(tensor: Tensor) -> list[Tensor]:
    """Return the inner tensors of a wrapper (of a DTensor, this rank's shard); none for other tensors."""
    return [*inner_by_name(tensor).values()] if is_wrapper(tensor) else []


def inner_by_name(wrapper: Any) -> dict[str, Tensor]:
    """Return a wrapper's inner tensors by the names of its attributes."""
    # torch.compile's protocol for tensor subclasses; item 0 of the result names the attributes that hold tensors.
    parts = {name: getattr(wrapper, name) for name in wrapper.__tensor_flatten__()[0]}
    return {name: part for name, part in parts.items() if isinstance(part, Tensor)}


def byte_tensors(tensor: Tensor) -> list[Tensor]:
    """Return the strided tensors with a tensor's bytes: itself, the parts of a sparse tensor, none for a wrapper."""
    if is_wrapper(tensor) or is_uninitialised(tensor):
        return []
    if tensor.layout is torch.strided:
        return [tensor]
    if tensor.layout is torch.sparse_coo:
        # The public indices() and values() reject a tensor that is not coalesced; coalescing it would change its bytes.
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in COMPRESSED:
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    raise TypeError(
        f"A tensor of layout {tensor.layout} cannot be part of a training state; convert it to a dense one."
    )


def storage_needed(tensor: Tensor) -> int:
    """Return the number of bytes that the storage of a strided tensor needs for all of its elements."""
    if not tensor.numel():
        return 0
    # last element = offset + sum over dimensions of (size - 1) * stride, in elements
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int(tensor.storage_offset() + last + 1) * tensor.itemsize


def is_cut_off(tensor: Tensor) -> bool:
    """Return whether the storage of a strided tensor is too small, so that reading it could crash the process."""
    return tensor.untyped_storage().nbytes() < storage_needed(tensor)


def regrow(tensor: Tensor) -> None:
    """Enlarge the storage of a strided tensor that was shrunk, so that it holds all elements."""
    if is_cut_off(tensor):
        tensor.untyped_storage().resize_(storage_needed(tensor))


def in_bytes(tensor: Tensor, kind: torch.dtype = torch.uint8) -> Tensor:
    """Return the bytes of a strided tensor in row-major order, as a one-byte dtype ``kind``; a view if possible."""
    # A dimension of one element may have any stride in a contiguous tensor, but view() needs stride 1.
    return tensor.contiguous().reshape(-1).as_strided((tensor.numel(),), (1,)).view(kind)


def is_shared_memory(tensor: Tensor) -> bool:
    """Return whether a tensor on the CPU is in memory that other processes may write to."""
    return type(tensor) in PLAIN and tensor.device.type == "cpu" and bool(tensor.is_shared())  # type: ignore[no-untyped-call]
