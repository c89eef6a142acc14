"""Digests of the bytes of many tensors at one time, and the comparison with their bytes later."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..state import digest_of
from ..tensors import device_sums, has_device_sums


class _Entry(NamedTuple):
    tensor: Tensor
    form: tuple[Any, ...]
    digest: Tensor | int
    """Sums on the tensor's device, or a digest that the host has computed."""


class RecordedBytes:
    """Digests of tensors: of those in host memory computed there, of those on an accelerator computed on it.

    Digests of an accelerator stay there, and a comparison transfers its result only, once per device. Recording does
    not wait for the device.
    """

    def __init__(self, tensors: Iterable[Tensor] = ()) -> None:
        unique = {id(tensor): tensor for tensor in tensors}
        self._entries = {key: _Entry(tensor, _form(tensor), _digest(tensor)) for key, tensor in unique.items()}

    def __bool__(self) -> bool:
        return bool(self._entries)

    @property
    def tensors(self) -> list[Tensor]:
        """The recorded tensors."""
        return [entry.tensor for entry in self._entries.values()]

    def changed(self, tensors: Iterable[Tensor] | None = None) -> list[Tensor]:
        """List those of ``tensors``, by default all recorded ones, whose bytes differ or were not recorded."""
        changed: list[Tensor] = []
        by_device: dict[torch.device, list[_Entry]] = {}
        for tensor in self.tensors if tensors is None else tensors:
            entry = self._entries.get(id(tensor))
            if entry is None or entry.form != _form(tensor):
                changed.append(tensor)
            elif isinstance(entry.digest, Tensor):
                by_device.setdefault(tensor.device, []).append(entry)
            elif entry.digest != digest_of(tensor):
                changed.append(tensor)
        for entries in by_device.values():
            previous = torch.stack([entry.digest for entry in entries])  # type: ignore[misc]
            now = torch.stack([device_sums(entry.tensor) for entry in entries])
            differing = (previous != now).any(1).tolist()
            changed += [entry.tensor for entry, differs in zip(entries, differing, strict=True) if differs]
        return changed


def _form(tensor: Tensor) -> tuple[Any, ...]:
    """Return what the sums of a tensor's bytes do not contain; the host's digests do."""
    return (tensor.dtype, tensor.device, tensor.shape) if has_device_sums(tensor) else ()


def _digest(tensor: Tensor) -> Tensor | int:
    if has_device_sums(tensor):
        try:
            return device_sums(tensor)
        except (RuntimeError, TypeError):  # a device without this arithmetic: the bytes are copied to the host
            pass
    return digest_of(tensor)
