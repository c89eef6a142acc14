"""The tensors that can be watched, copied and rolled back, and the refusal of all others before the first step."""

import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from ..errors import UsageError, describe_error, shortened
from ..tensors import COMPRESSED, PLAIN, inner_tensors, is_uninitialised
from .digest import digest

_USUAL = frozenset(
    {
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
        *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2),
    }
)
_LAYOUTS = frozenset({torch.strided, torch.sparse_coo, *COMPRESSED})


def refuse_unprotectable(named: Iterable[tuple[str, Any]]) -> None:
    """Check that the bytes of tensors can be read, copied and written.

    Raises:
        UsageError: for the first tensor for which they cannot; the error names it.
    """
    for name, tensor in named:
        if isinstance(tensor, Tensor) and not is_uninitialised(tensor) and (reason := _obstacle(tensor)):
            raise UsageError(
                f"{name} is {reason}, which can neither be watched nor rolled back; accepted are dense and sparse "
                "tensors that own their numbers, so convert it before the training (tensor.to_dense(), or "
                "torch.nested.nested_tensor(..., layout=torch.jagged)), or keep it outside of model and optimizer."
            )


def _obstacle(tensor: Tensor) -> str:
    """Return what prevents the protection of a tensor, or an empty text."""
    if tensor.is_nested and tensor.layout is torch.strided:
        return "a nested tensor of layout torch.strided"
    if tensor._is_zerotensor():
        return "a tensor of zeros without memory (torch._efficientzerotensor)"
    fake_tensors: Any = sys.modules.get("torch._subclasses.fake_tensor")
    if fake_tensors is not None and isinstance(tensor, fake_tensors.FakeTensor):
        return "a FakeTensor"
    if type(tensor) in PLAIN and tensor.layout in _LAYOUTS and tensor.dtype in _USUAL:
        return ""
    if parts := inner_tensors(tensor):  # a DTensor, a quantised tensor of torchao, a jagged tensor
        return next(filter(None, map(_obstacle, parts)), "")
    return _tried(tensor)


@torch.no_grad()
def _tried(tensor: Tensor) -> str:
    """Copy and digest a tensor of a rare kind, since torch has no list of what it supports."""
    kind = f"a {type(tensor).__name__} of layout {tensor.layout} and dtype {tensor.dtype}"
    try:
        alias = tensor.detach()
        digest(alias)
        if not tensor.is_meta and tensor.layout is torch.strided:
            torch.empty_like(alias).copy_(alias.clone())
    except Exception as error:
        return f"{kind} ({shortened(describe_error(error), 100)})"
    return ""


def named_tensors(prefix: str, space: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that are values of a dict, with their names."""
    for key, value in space.items():
        if isinstance(value, Tensor):
            yield f"{prefix}{key}", value
