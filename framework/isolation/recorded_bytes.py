"""Digests of the bytes of many tensors at one time, and the comparison with their bytes later."""

from collections.abc import Iterable
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ..state import digest_of
from ..tensors import device_sums, has_device_sums

Key = TypeVar("Key")


class _Digest(NamedTuple):
    form: tuple[Any, ...]
    """What the sums of a tensor's bytes do not contain; the host's digests do."""
    value: Tensor | int
    """Sums on the tensor's device, or a digest that the host has computed."""


class RecordedBytes:
    """Digests of tensors: of those in host memory computed there, of those on an accelerator computed on it.

    Digests of an accelerator stay there, and a comparison transfers its result only, once per device. Recording does
    not wait for the device.
    """

    def __init__(self, tensors: Iterable[Tensor] = ()) -> None:
        unique = {id(tensor): tensor for tensor in tensors}
        self._entries = {key: (tensor, _digest(tensor)) for key, tensor in unique.items()}

    def __bool__(self) -> bool:
        return bool(self._entries)

    @property
    def tensors(self) -> list[Tensor]:
        """The recorded tensors."""
        return [tensor for tensor, _ in self._entries.values()]

    def changed(self, tensors: Iterable[Tensor] | None = None) -> list[Tensor]:
        """List those of ``tensors``, by default all recorded ones, whose bytes differ or were not recorded."""
        entries = [(tensor, self._entries.get(id(tensor))) for tensor in (self.tensors if tensors is None else tensors)]
        return _differing([(tensor, entry and entry[1], _digest(tensor)) for tensor, entry in entries])


NO_BYTES = RecordedBytes()
"""A record of no tensors."""


class RecordedEntries:
    """Digests of tensors and other values by name, computed and compared as in :class:`RecordedBytes`.

    It keeps none of the tensors, so that an entry may be another one later.
    """

    def __init__(self, leaves: Iterable[tuple[str, Any]] = ()) -> None:
        self._digests = {name: _digest(leaf) for name, leaf in leaves}

    def differing(self, now: "RecordedEntries") -> list[str]:
        """List the names of entries whose digests differ, or that only one of both has."""
        names = {**self._digests, **now._digests}
        return _differing([(name, self._digests.get(name), now._digests.get(name)) for name in names])


def _digest(leaf: Any) -> _Digest:
    if has_device_sums(leaf):
        with suppress(RuntimeError, TypeError):  # a device without this arithmetic: the bytes are copied to the host
            return _Digest((leaf.dtype, leaf.device, leaf.shape), device_sums(leaf))
    return _Digest((), digest_of(leaf))


def _differing(pairs: list[tuple[Key, _Digest | None, _Digest | None]]) -> list[Key]:
    """List the keys of pairs whose digests differ or of which one is missing; wait once for each device."""
    differs = [False] * len(pairs)
    by_device: dict[torch.device, list[tuple[int, Tensor, Tensor]]] = {}
    for place, (_, previous, now) in enumerate(pairs):
        if previous is None or now is None or previous.form != now.form:
            differs[place] = True
        elif isinstance(previous.value, Tensor) and isinstance(now.value, Tensor):
            by_device.setdefault(previous.value.device, []).append((place, previous.value, now.value))
        else:
            differs[place] = bool(previous.value != now.value)
    for rows in by_device.values():
        places, previous_sums, current_sums = zip(*rows, strict=True)
        are_unequal = (torch.stack(previous_sums) != torch.stack(current_sums)).any(1).tolist()
        for place, is_unequal in zip(places, are_unequal, strict=True):
            differs[place] = is_unequal
    return [key for (key, *_), is_different in zip(pairs, differs, strict=True) if is_different]
