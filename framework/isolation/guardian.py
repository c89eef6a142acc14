"""Snapshots: a full copy of the training state in reused buffers, put back in place after an intervention."""

from collections.abc import Container, Iterable
from copy import deepcopy
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from ..state import (
    BriefIdentities,
    StreamState,
    Structure,
    TensorIdentities,
    TrainingState,
    addresses,
    finish_sharding,
    fully_sharded_modules,
)

_grad = attrgetter("grad")
_shape = attrgetter("shape")
_dtype = attrgetter("dtype")
_device = attrgetter("device")


class Part:
    """The objects of a part of the training state: what its containers hold, and the identities of its tensors."""

    def __init__(self, roots: Iterable[Any], *, apart: Container[int] = (), lasting: bool) -> None:
        self.structure = Structure(roots, apart=apart)
        self.identities = TensorIdentities(self.structure.tensors, lasting=lasting)

    def is_current(self) -> bool:
        """Tell whether every object is there and what it was, the bytes of tensors aside."""
        return self.structure.is_current() and self.identities.is_current()

    def changed(self) -> list[Any]:
        """List the objects, containers and tensors that are not what they were, the bytes of tensors aside."""
        return self.structure.changed() + self.identities.changed()

    def put_back(self) -> None:
        """Make every object what it was, the bytes of tensors aside."""
        self.structure.put_back()
        self.identities.put_back()


class Moment:
    """The same for objects that are new at most steps."""

    def __init__(self, roots: Iterable[Any], *, apart: Container[int]) -> None:
        self.structure = Structure(roots, apart=apart)
        tensors = self.structure.tensors
        brief = BriefIdentities.suit(tensors)
        self.identities = BriefIdentities(tensors) if brief else TensorIdentities(tensors, lasting=False)

    def put_back(self) -> None:
        """Make every object what it was, the bytes of tensors aside."""
        self.structure.put_back()
        self.identities.put_back()


class Buffers:
    """Preallocated tensors that hold copies of others."""

    def __init__(self, device: torch.device | None) -> None:
        self.tensors: list[Tensor] = []
        self._device = device
        self._formats: list[Any] = []

    def fit(self, sources: list[Tensor]) -> None:
        """Make room for ``sources``: reuse what still matches, allocate the rest, free what is left over."""
        formats = [*map(_shape, sources), *map(_dtype, sources), *map(_device, sources)]
        if formats == self._formats:
            return
        self._formats = formats
        spare: dict[tuple[Any, ...], list[Tensor]] = {}
        for buffer in reversed(self.tensors):
            spare.setdefault((buffer.shape, buffer.dtype, buffer.device), []).append(buffer)
        self.tensors = [
            stack.pop()
            if (stack := spare.get((source.shape, source.dtype, self._device or source.device)))
            else torch.empty_like(source, device=self._device or source.device)
            for source in sources
        ]


class Snapshot:
    """A full copy of a training state; the buffers are allocated at the first ``save`` and reused by the next.

    Objects that last (modules, parameters, optimizer state) are walked once, and again when they have changed;
    those of the moment (gradients, the loop's accumulators, settings) at every ``save``.
    """

    def __init__(self, device: torch.device | None = None, *, streams: bool = False) -> None:
        """Make an empty snapshot.

        Args:
            device: where the copies live (``None``: where the originals live).
            streams: save the random streams as well, which the isolation otherwise puts back at the end of a visit.
        """
        self._with_streams = streams
        self._roots: tuple[Any, ...] = ()
        self._sharded: list[Any] = []
        self._lasting: Part | None = None
        self._passing: Moment | None = None
        self._lasting_bytes = Buffers(device)
        self._passing_bytes = Buffers(device)
        self._gradients: tuple[Tensor | None, ...] = ()
        self._streams: StreamState | None = None
        self._flags: tuple[Any, ...] = ()
        self._extras: dict[str, dict[str, Any]] = {}

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The copies, for digests and durable checkpoints."""
        return {str(index): buffer for index, buffer in enumerate(self._copies)}

    @property
    def _copies(self) -> list[Tensor]:
        return self._lasting_bytes.tensors + self._passing_bytes.tensors

    def save(self, state: TrainingState) -> "Snapshot":
        """Copy the state; the bytes last, since copying them empties the caches of everything else."""
        with torch.no_grad():
            lasting = self._refresh_lasting(state)
            self._gradients = (*map(_grad, lasting.identities.owners),)
            moment = (self._gradients, *state.optimizer.param_groups, state.scheduler, state.scaler, vars(state.loop))
            self._passing = Moment(moment, apart=lasting.structure.seen)
            self._passing_bytes.fit(self._passing.identities.bytes)
        self._streams = state.streams.save() if self._with_streams else None
        self._flags = state.flags.read_all()
        self._extras = {name: deepcopy(extra.state_dict()) for name, extra in state.extras.items()}
        _copy(self._copies, lasting.identities.bytes + self._passing.identities.bytes)
        return self

    def _refresh_lasting(self, state: TrainingState) -> Part:
        groups = state.optimizer.param_groups
        roots = (state.model, state.optimizer, *[group["params"] for group in groups])
        lasting = self._lasting
        if lasting is None or addresses(roots) != addresses(self._roots) or not lasting.is_current():
            self._sharded = fully_sharded_modules(state.model)
            finish_sharding(self._sharded)
            self._roots, self._lasting = roots, (lasting := Part(roots, apart={*map(id, groups)}, lasting=True))
            self._lasting_bytes.fit(lasting.identities.bytes)
        return lasting

    def restore(self, state: TrainingState) -> None:
        """Put the state back, in place: the same objects, holding the same bytes."""
        lasting, passing = self._lasting, self._passing
        if lasting is None or passing is None:
            raise RuntimeError("restore() without save(): this snapshot holds nothing.")
        state.flags.restore(self._flags)
        with torch.no_grad():
            for module in self._sharded:
                module.reshard()
            lasting.put_back()
            passing.put_back()
            owners = lasting.identities.owners
            if addresses(self._gradients) != addresses((*map(_grad, owners),)):
                for owner, gradient in zip(owners, self._gradients, strict=True):
                    owner.grad = gradient
        for name, saved in self._extras.items():
            state.extras[name].load_state_dict(deepcopy(saved))
        if self._streams is not None:
            self._streams.restore()
        _copy(lasting.identities.bytes + passing.identities.bytes, self._copies)

    def release(self) -> None:
        """Let go of the gradients and accumulators of the moment, so that their memory can be freed."""
        self._passing = None
        self._gradients = ()


@torch.no_grad()
def _copy(destinations: list[Tensor], sources: list[Tensor]) -> None:
    """Copy tensor by tensor; where a destination repeats elements (stride 0), each is written once."""
    try:
        torch._foreach_copy_(destinations, sources)
    except RuntimeError:
        for destination, source in zip(destinations, sources, strict=True):
            once = tuple([slice(0, 1) if stride == 0 else slice(None) for stride in destination.stride()])
            destination[once].copy_(source[once])
