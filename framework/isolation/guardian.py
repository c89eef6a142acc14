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

    def __init__(self, roots: Iterable[Any], *, apart: Container[int] = (), lasting: bool) -> None:
        self.structure = Structure(roots, apart=apart)
        self.identities = TensorIdentities(self.structure.tensors, lasting=lasting)

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
        self._lasting: Objects | None = None
        self._passing: tuple[Structure, BriefIdentities | TensorIdentities] | None = None
        self._lasting_bytes = Buffers(device)
        self._passing_bytes = Buffers(device)
        self._kept: list[tuple[Guarded, Any]] = []
        self._natives: list[list[Any]] = []

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The copies, for digests and durable checkpoints."""
        return {str(index): buffer for index, buffer in enumerate(self._copies)}

    @property
    def _copies(self) -> list[Tensor]:
        return self._lasting_bytes.tensors + self._passing_bytes.tensors

    def save(self, state: TrainingState) -> "Snapshot":
        """Copy the state; the bytes last, since copying them empties the caches of everything else.

        Raises :class:`UsageError` that names an object whose state is out of reach.
        """
        parts = [part.guarded for part in state.parts if self._with_streams or part is not GENERATORS]
        state.sharding.scatter()  # or a gathered copy that an intervention left would be walked
        with torch.no_grad():
            lasting = self._refresh_lasting(state, parts)
        self._kept = [(part, part.keep(state, lasting.identities.owners)) for part in parts]
        moment = chain.from_iterable([part.passing(kept) for part, kept in self._kept if part.passing is not None])
        with torch.no_grad():
            structure = Structure(moment, apart=lasting.structure.seen)
            if lasting.structure.opaque or structure.opaque:
                raise UsageError(state.out_of_reach())
            # new at most steps, so that setting its tensors again, where they allow it, is cheaper than comparing them
            tensors, brief = structure.tensors, BriefIdentities.suit(structure.tensors)
            identities = BriefIdentities(tensors) if brief else TensorIdentities(tensors, lasting=False)
            self._passing = structure, identities
            self._passing_bytes.fit(identities.bytes)
        self._natives = [lasting.structure.read_natives(), structure.read_natives()]
        copy_each(self._copies, lasting.identities.bytes + identities.bytes)
        return self

    def _refresh_lasting(self, state: TrainingState, parts: list[Guarded]) -> Objects:
        roots = (*chain.from_iterable([part.lasting(state) for part in parts]),)
        lasting = self._lasting
        if lasting is None or addresses(roots) != addresses(self._roots) or not lasting.is_current():
            apart = {*map(id, chain.from_iterable([part.apart(state) for part in parts]))}
            self._roots, self._lasting = roots, (lasting := Objects(roots, apart=apart, lasting=True))
            self._lasting_bytes.fit(lasting.identities.bytes)
        return lasting

    def restore(self, state: TrainingState) -> None:
        """Put the state back, in place: the same objects, holding the same bytes."""
        lasting, passing = self._lasting, self._passing
        if lasting is None or passing is None:
            raise RuntimeError("restore() without save(): this snapshot holds nothing.")
        owners = lasting.identities.owners
        for part, kept in self._kept:
            # Settings, such as inference mode, under which tensors could not be put back.
            if part.first:
                part.put_back(state, owners, kept)
        with torch.no_grad():
            for objects in (lasting.structure, lasting.identities, *passing):
                objects.put_back()
        for part, kept in self._kept:
            if not part.first:
                part.put_back(state, owners, kept)
        for structure, states in zip((lasting.structure, passing[0]), self._natives, strict=True):
            structure.write_natives(states)
        # The bytes last, into the storages that the tensors have again.
        copy_each(lasting.identities.bytes + passing[1].bytes, self._copies)

    def release(self) -> None:
        """Let go of the gradients and accumulators of the moment, so that their memory can be freed."""
        self._passing = None
        self._kept = []
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
