"""Properties of tensors other than their values: class, requires_grad, dtype, layout and lazy bits, read cheaply."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import guards
from .storage import COMPRESSED, is_uninitialised


class Properties(NamedTuple):
    """The properties of one tensor that are compared by value."""

    kind: type
    requires_grad: bool
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    conjugate: bool
    negative: bool


NAMES = {
    "kind": "its class",
    "requires_grad": "its requires_grad",
    "dtype": "its dtype",
    "shape": "its shape",
    "stride": "its strides",
    "conjugate": "its lazy conjugate bit",
    "negative": "its lazy negative bit",
}


def lazy_bits(tensor: Tensor) -> tuple[bool, bool]:
    """Return whether a tensor shows the conjugates, or the negatives, of the numbers in its memory."""
    return tensor.is_conj(), tensor.is_neg()


def pointer_and_bits(tensor: Tensor) -> tuple[int, bool, bool]:
    """Return the memory address and the lazy bits of a tensor."""
    return tensor.data_ptr(), tensor.is_conj(), tensor.is_neg()


def properties_of(tensor: Tensor) -> Properties:
    """Return the properties of a tensor, without calling code of its class."""
    with torch._C.DisableTorchFunctionSubclass():
        has_strides = tensor.layout not in COMPRESSED and not tensor.is_nested
        return Properties(
            type(tensor),
            tensor.requires_grad,
            tensor.dtype,
            () if tensor.is_nested else (*tensor.shape,),
            (*tensor.stride(),) if has_strides and tensor.layout is torch.strided else (),
            *lazy_bits(tensor),
        )


class TensorProperties:
    """The properties of many tensors; reading unchanged ones again is one call of torch's guard.

    The guard takes 11 µs for 150 tensors, and reading ``requires_grad`` alone 5 µs, but only the guard shows the lazy
    bits: ``p.data = p.data.conj()`` changes neither version nor memory address.
    """

    def __init__(self, tensors: list[Tensor]) -> None:
        """Read the properties of ``tensors``; uninitialised ones, which have none yet, are left out."""
        self.tensors = [tensor for tensor in tensors if not is_uninitialised(tensor)]
        self._properties: tuple[Properties, ...] = ()
        self._check: Callable[..., bool] | None = None
        self._refresh()

    def read(self) -> tuple[Properties, ...]:
        """Return the properties of all tensors; the same tuple as before if none has changed."""
        if self._check is None or not self._check(*self.tensors):
            self._refresh()
        return self._properties

    def _refresh(self) -> None:
        self._properties = (*map(properties_of, self.tensors),)
        can_guard = guards.is_available and all(_has_guard(tensor) for tensor in self.tensors)
        self._check = guards.guard_of(self.tensors) if self.tensors and can_guard else None

    def differences(self, names: dict[int, str], previous: tuple[Properties, ...]) -> list[str]:
        """Name the tensors whose properties differ from ``previous``, each with its first changed property."""
        changes = []
        for tensor, old, new in zip(self.tensors, previous, self.read(), strict=True):
            if old != new:
                field = next(name for name in Properties._fields if getattr(old, name) != getattr(new, name))
                changes.append(f"{names.get(id(tensor), 'a parameter')} ({NAMES[field]})")
        return changes

    def restore(self, previous: tuple[Properties, ...]) -> None:
        """Restore class and requires_grad."""
        for tensor, properties in zip(self.tensors, previous, strict=True):
            if type(tensor) is not properties.kind:
                tensor.__class__ = properties.kind  # type: ignore[assignment]
            if tensor.requires_grad is not properties.requires_grad:
                tensor.requires_grad_(properties.requires_grad)


def _has_guard(tensor: Any) -> bool:
    return bool(tensor.layout is torch.strided and not tensor.is_nested)
