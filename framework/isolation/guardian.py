"""Copies of the training state in reused buffers, restored in place after an intervention."""

from collections.abc import Container, Iterable
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.autograd import grad_mode

from ..errors import UsageError
from ..state import Part, Structure, TrainingState, Transient
from ..tensors import BriefIdentities, TensorIdentities, addresses, local_shards

_shape = attrgetter("shape")
_dtype = attrgetter("dtype")
_device = attrgetter("device")


class Objects:
    """Objects of the training state: the contents of their containers and the identities of their tensors."""

    def __init__(self, roots: Iterable[Any], *, excluded: Container[int] = ()) -> None:
        self.structure = Structure(roots, excluded=excluded)
        self.identities = TensorIdentities(self.structure.tensors)

    def is_current(self, *, keeps_graphs: bool = False) -> bool:
        """Return whether no object has changed, apart from the bytes of tensors; with ``keeps_graphs`` graphs may."""
        return self.structure.is_current() and self.identities.is_current(keeps_graphs=keeps_graphs)

    def changed(self) -> list[Any]:
        """List the objects, containers and tensors that changed, apart from the bytes of tensors."""
        return self.structure.changed() + self.identities.changed()


class CopyBuffers:
    """Preallocated tensors that hold copies of others."""

    def __init__(self, device: torch.device | None) -> None:
        self.tensors: list[Tensor] = []
        self._device = device
        self._formats: list[Any] = []

    def fit(self, sources: list[Tensor]) -> None:
        """Provide one buffer for each of ``sources``: reuse matching ones, allocate the others, free the rest."""
        # Buffers are reused: on a CPU, a copy of 400 MB takes 28 ms, and a new clone 180 ms because of page faults.
        # Compared as three flat lists, since building a key for each tensor takes longer than most saves.
        formats = [*map(_shape, sources), *map(_dtype, sources), *map(_device, sources)]
        if formats == self._formats:
            return
        self._formats = formats
        # If a few gradients appear or disappear between two saves, the other buffers are kept.
        spare: dict[tuple[Any, ...], list[Tensor]] = {}
        for buffer in reversed(self.tensors):
            spare.setdefault((buffer.shape, buffer.dtype, buffer.device), []).append(buffer)
        self.tensors = [
            stack.pop()
            if (stack := spare.get((source.shape, source.dtype, self._device or source.device)))
            else torch.empty_like(source, device=self._device or source.device)
            for source in sources
        ]


class StateCopy(Transient):
    """A full copy of a training state; the first ``save`` allocates buffers, later ones reuse them.

    Persistent objects (modules, parameters, optimizer state) are walked once, and again after they changed; temporary
    ones (gradients, the loop's accumulators, settings) are walked at every ``save``.
    """

    def __init__(self, device: torch.device | None = None, *, streams: bool = False, versions: bool = False) -> None:
        """Create an empty state copy with its tensors on ``device`` (``None``: the devices of the originals).

        ``streams`` also saves the random streams, which the isolation otherwise restores at the end of a visit.
        ``versions`` also restores the version counters of tensors, so that a graph that the loop has built before can
        still run backward.
        """
        self._with_streams, self._with_versions = streams, versions
        self._versions: grad_mode._unsafe_preserve_version_counter | None = None
        self._roots: tuple[Any, ...] = ()
        self._persistent: Objects | None = None
        self._temporary: tuple[Structure, BriefIdentities | TensorIdentities] | None = None
        self._persistent_bytes = CopyBuffers(device)
        self._temporary_bytes = CopyBuffers(device)
        self._kept_parts: list[tuple[Part, Any]] = []
        self._natives: list[list[Any]] = []

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The copies, for digests and durable checkpoints."""
        return {str(index): buffer for index, buffer in enumerate(self._copies)}

    @property
    def _copies(self) -> list[Tensor]:
        return self._persistent_bytes.tensors + self._temporary_bytes.tensors

    def save(self, state: TrainingState) -> "StateCopy":
        """Copy the state; bytes last, since copying them evicts everything else from the processor's caches.

        Raises:
            UsageError: if the state of an object is out of reach; the error names the object.
        """
        parts = [part for part in state.parts if self._with_streams or part.name != "generators"]
        state.sharding.scatter()  # otherwise a gathered copy that an intervention left would be saved
        with torch.no_grad():
            persistent = self._refresh_persistent(state, parts)
        self._kept_parts = [(part, part.keep(state, persistent.identities.owners)) for part in parts]
        temporary = [part.temporary(kept) for part, kept in self._kept_parts if part.has_temporary]
        with torch.no_grad():
            structure = Structure(chain.from_iterable(temporary), excluded=persistent.structure.seen)
            if persistent.structure.opaque or structure.opaque:
                raise UsageError(state.out_of_reach())
            # Temporary tensors are new on most steps: setting them again, if they allow it, is cheaper than comparing.
            tensors, brief = structure.tensors, BriefIdentities.suit(structure.tensors)
            identities = BriefIdentities(tensors) if brief else TensorIdentities(tensors)
            self._temporary = structure, identities
            self._temporary_bytes.fit(identities.bytes)
        self._natives = [persistent.structure.read_natives(), structure.read_natives()]
        # Not by deepcopy(optimizer.state_dict()) and load_state_dict, which take 5 times as long as copying both ways;
        # without the deepcopy, the state dict would share the live tensors, and the next step would change them.
        originals = persistent.identities.bytes + identities.bytes
        copy_each(self._copies, originals)
        if self._with_versions:
            # Restoring bytes counts as a write, after which autograd refuses the backward pass of an earlier graph. The
            # bytes are the same, so the counters may be as well; torch has no public function that sets them.
            counted = tuple([tensor for tensor in originals if not tensor.is_inference()])
            self._versions = grad_mode._unsafe_preserve_version_counter(counted)
        return self

    def _refresh_persistent(self, state: TrainingState, parts: list[Part]) -> Objects:
        roots = (*chain.from_iterable([part.persistent(state) for part in parts]),)
        persistent = self._persistent
        if persistent is None or addresses(roots) != addresses(self._roots) or not persistent.is_current():
            excluded = {*map(id, chain.from_iterable([part.excluded(state) for part in parts]))}
            self._roots, self._persistent = roots, (persistent := Objects(roots, excluded=excluded))
            self._persistent_bytes.fit(persistent.identities.bytes)
        return persistent

    def restore(self, state: TrainingState) -> None:
        """Restore the state in place: the same objects with the same bytes."""
        persistent, temporary = self._persistent, self._temporary
        if persistent is None or temporary is None:
            raise RuntimeError("restore() was called before save(), so the state copy is empty; call save() first.")
        owners = persistent.identities.owners
        for part, kept in self._kept_parts:
            # Settings such as inference mode, under which tensors cannot be restored.
            if part.restored_first:
                part.restore(state, owners, kept)
        with torch.no_grad():
            for objects in (persistent.structure, persistent.identities, *temporary):
                objects.restore()
        for part, kept in self._kept_parts:
            if not part.restored_first:
                part.restore(state, owners, kept)
        for structure, states in zip((persistent.structure, temporary[0]), self._natives, strict=True):
            structure.write_natives(states)
        # Bytes last, into the restored storages.
        copy_each(persistent.identities.bytes + temporary[1].bytes, self._copies)
        if self._versions is not None:
            self._versions.__exit__(None, None, None)

    def release(self) -> None:
        """Drop gradients and accumulators, so that their memory can be freed."""
        self._temporary = self._versions = None
        self._kept_parts = []
        self._natives = []


@torch.no_grad()
def copy_each(destinations: list[Tensor], sources: list[Tensor]) -> None:
    """Copy sources to destinations; elements that a destination repeats (stride 0) are written once."""
    try:
        # One private foreach call takes 0.3 µs per small tensor, a copy_ of each 1.5 µs.
        torch._foreach_copy_(destinations, sources)
    except RuntimeError:  # torch rejects writes to a tensor whose elements share memory, as in an expanded one
        for destination, source in zip(destinations, sources, strict=True):
            once = tuple([slice(0, 1) if stride == 0 else slice(None) for stride in destination.stride()])
            destination[once].copy_(source[once])


class LightStateCopy:
    """Copies of parameters, buffers and random streams: the state that forward and backward passes change."""

    def __init__(self, state: TrainingState) -> None:
        self._tensors = [*state.modules.parameters(), *state.modules.buffers()]
        self._copies = [tensor.detach().clone() for tensor in local_shards(self._tensors)]
        self._streams = state.streams.save()

    def restore(self, state: TrainingState) -> None:
        """Restore parameters, buffers and random streams in place."""
        copy_each(local_shards(self._tensors), self._copies)
        self._streams.restore()
