"""Snapshots: a full copy of the training state in reused buffers, put back in place after an intervention."""

from collections.abc import Container, Iterable
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from ..errors import UsageError
from ..state import (
    GENERATORS,
    BriefIdentities,
    Guarded,
    Structure,
    TensorIdentities,
    TrainingState,
    Transient,
    addresses,
    local_shards,
)

_shape = attrgetter("shape")
_dtype = attrgetter("dtype")
_device = attrgetter("device")


class Objects:
    """Objects of the training state: what their containers hold, and the identities of their tensors."""

    def __init__(self, roots: Iterable[Any], *, excluded: Container[int] = (), persistent: bool) -> None:
        self.structure = Structure(roots, excluded=excluded)
        self.identities = TensorIdentities(self.structure.tensors, persistent=persistent)

    def is_current(self) -> bool:
        """Return whether every object is there and what it was, the bytes of tensors aside."""
        return self.structure.is_current() and self.identities.is_current()

    def changed(self) -> list[Any]:
        """List the objects, containers and tensors that are not what they were, the bytes of tensors aside."""
        return self.structure.changed() + self.identities.changed()


class Buffers:
    """Preallocated tensors that hold copies of others."""

    def __init__(self, device: torch.device | None) -> None:
        self.tensors: list[Tensor] = []
        self._device = device
        self._formats: list[Any] = []

    def fit(self, sources: list[Tensor]) -> None:
        """Make room for ``sources``: reuse what still matches, allocate the rest, free what is left over."""
        # compared as three flat lists, since building a key for each tensor takes longer than most saves
        formats = [*map(_shape, sources), *map(_dtype, sources), *map(_device, sources)]
        if formats == self._formats:
            return
        self._formats = formats
        # A few gradients that come or go between two saves are no reason to allocate the rest anew.
        spare: dict[tuple[Any, ...], list[Tensor]] = {}
        for buffer in reversed(self.tensors):
            spare.setdefault((buffer.shape, buffer.dtype, buffer.device), []).append(buffer)
        self.tensors = [
            stack.pop()
            if (stack := spare.get((source.shape, source.dtype, self._device or source.device)))
            else torch.empty_like(source, device=self._device or source.device)
            for source in sources
        ]


class Snapshot(Transient):
    """A full copy of a training state; the buffers are allocated at the first ``save`` and reused by the next.

    Objects that last (modules, parameters, optimizer state) are walked once, and again when they have changed;
    those of the moment (gradients, the loop's accumulators, settings) at every ``save``.
    """

    def __init__(self, device: torch.device | None = None, *, streams: bool = False) -> None:
        """Make an empty snapshot whose copies will live on ``device`` (``None``: where the originals live).

        ``streams`` saves the random streams as well, which the isolation otherwise puts back at the end of a visit.
        """
        self._with_streams = streams
        self._roots: tuple[Any, ...] = ()
        self._persistent: Objects | None = None
        self._temporary: tuple[Structure, BriefIdentities | TensorIdentities] | None = None
        self._persistent_bytes = Buffers(device)
        self._temporary_bytes = Buffers(device)
        self._saved_parts: list[tuple[Guarded, Any]] = []
        self._natives: list[list[Any]] = []

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The copies, for digests and durable checkpoints."""
        return {str(index): buffer for index, buffer in enumerate(self._copies)}

    @property
    def _copies(self) -> list[Tensor]:
        return self._persistent_bytes.tensors + self._temporary_bytes.tensors

    def save(self, state: TrainingState) -> "Snapshot":
        """Copy the state; the bytes last, since copying them empties the caches of everything else.

        Raises :class:`UsageError` that names an object whose state is out of reach.
        """
        parts = [part.guarded for part in state.parts if self._with_streams or part is not GENERATORS]
        state.sharding.scatter()  # or a gathered copy that an intervention left would be walked
        with torch.no_grad():
            persistent = self._refresh_persistent(state, parts)
        self._saved_parts = [(part, part.save(state, persistent.identities.owners)) for part in parts]
        moment = chain.from_iterable(
            [part.temporary(saved) for part, saved in self._saved_parts if part.temporary is not None]
        )
        with torch.no_grad():
            structure = Structure(moment, excluded=persistent.structure.seen)
            if persistent.structure.opaque or structure.opaque:
                raise UsageError(state.out_of_reach())
            # new at most steps, so that setting its tensors again, where they allow it, is cheaper than comparing them
            tensors, brief = structure.tensors, BriefIdentities.suit(structure.tensors)
            identities = BriefIdentities(tensors) if brief else TensorIdentities(tensors, persistent=False)
            self._temporary = structure, identities
            self._temporary_bytes.fit(identities.bytes)
        self._natives = [persistent.structure.read_natives(), structure.read_natives()]
        copy_each(self._copies, persistent.identities.bytes + identities.bytes)
        return self

    def _refresh_persistent(self, state: TrainingState, parts: list[Guarded]) -> Objects:
        roots = (*chain.from_iterable([part.persistent(state) for part in parts]),)
        persistent = self._persistent
        if persistent is None or addresses(roots) != addresses(self._roots) or not persistent.is_current():
            excluded = {*map(id, chain.from_iterable([part.excluded(state) for part in parts]))}
            self._roots, self._persistent = roots, (persistent := Objects(roots, excluded=excluded, persistent=True))
            self._persistent_bytes.fit(persistent.identities.bytes)
        return persistent

    def restore(self, state: TrainingState) -> None:
        """Put the state back, in place: the same objects, holding the same bytes."""
        persistent, temporary = self._persistent, self._temporary
        if persistent is None or temporary is None:
            raise RuntimeError("restore() without save(): this snapshot holds nothing.")
        owners = persistent.identities.owners
        for part, saved in self._saved_parts:
            # Settings, such as inference mode, under which tensors could not be put back.
            if part.restored_first:
                part.restore(state, owners, saved)
        with torch.no_grad():
            for objects in (persistent.structure, persistent.identities, *temporary):
                objects.restore()
        for part, saved in self._saved_parts:
            if not part.restored_first:
                part.restore(state, owners, saved)
        for structure, states in zip((persistent.structure, temporary[0]), self._natives, strict=True):
            structure.write_natives(states)
        # The bytes last, into the storages that the tensors have again.
        copy_each(persistent.identities.bytes + temporary[1].bytes, self._copies)

    def release(self) -> None:
        """Let go of the gradients and accumulators of the moment, so that their memory can be freed."""
        self._temporary = None
        self._saved_parts = []
        self._natives = []


@torch.no_grad()
def copy_each(destinations: list[Tensor], sources: list[Tensor]) -> None:
    """Copy tensor by tensor; where a destination repeats elements (stride 0), each is written once."""
    try:
        # one call for all: 0.3 µs a small tensor, where a copy_ of each takes 1.5 µs
        torch._foreach_copy_(destinations, sources)
    except RuntimeError:  # torch refuses to write to a tensor whose elements share memory, as an expanded one's do
        for destination, source in zip(destinations, sources, strict=True):
            once = tuple([slice(0, 1) if stride == 0 else slice(None) for stride in destination.stride()])
            destination[once].copy_(source[once])


class LightSnapshot:
    """Copies of parameters and buffers, and the random streams: what work that runs forward and backward needs back."""

    def __init__(self, state: TrainingState) -> None:
        self._tensors = [*state.model.parameters(), *state.model.buffers()]
        self._copies = [tensor.detach().clone() for tensor in local_shards(self._tensors)]
        self._streams = state.streams.save()

    def restore(self, state: TrainingState) -> None:
        """Put parameters, buffers and random streams back, in place."""
        copy_each(local_shards(self._tensors), self._copies)
        self._streams.restore()
