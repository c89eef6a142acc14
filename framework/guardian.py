"""Snapshots: a full copy of the training state in reused buffers, put back in place after an intervention."""

from collections import deque
from collections.abc import Iterable
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from framework.param_vectors import local_shards
from framework.random_streams import StreamState
from framework.training_state import TrainingState

_OBJECTS = (nn.Module, Optimizer, LRScheduler, torch.amp.GradScaler)
_ATOMS = frozenset({bool, int, float, str, type(None), type(lambda: 0), type([].append), torch.dtype, torch.device})


@dataclass
class Structure:
    """The containers of the training state with shallow copies of their contents, and the tensors in them.

    Putting a structure back makes every container hold the very objects it held; the contents of the tensors are
    the snapshot's business.
    """

    tables: list[tuple[dict[Any, Any], dict[Any, Any]]] = field(default_factory=list)
    sequences: list[tuple[Any, list[Any]]] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    _seen: set[int] = field(default_factory=set)

    @classmethod
    def of(cls, state: TrainingState) -> "Structure":
        """Walk the training state."""
        structure = cls()
        for root in (*state.model.modules(), state.optimizer, state.scheduler, state.scaler):
            structure._remember_object(root)
        structure._remember_table(vars(state.loop), skip="pre_epoch")
        return structure

    def _remember_object(self, value: Any) -> None:
        if value is not None:
            self._remember_table(vars(value))

    def _remember_table(self, table: dict[Any, Any], skip: str = "") -> None:
        if id(table) in self._seen:
            return
        self._seen.add(id(table))
        self.tables.append((table, table.copy()))
        for key, value in table.items():
            if type(value) not in _ATOMS and key != skip:
                self._remember(value)

    def _remember(self, value: Any) -> None:
        if isinstance(value, Tensor):
            if id(value) not in self._seen:
                self._seen.add(id(value))
                self.tensors.append(value)
                if value.grad_fn is None and value.grad is not None:
                    self._remember(value.grad)
        elif isinstance(value, dict):
            self._remember_table(value)
        elif isinstance(value, (list, deque, set)):
            if id(value) not in self._seen:
                self._seen.add(id(value))
                self.sequences.append((value, list(value)))
                self._remember_all(value)
        elif isinstance(value, tuple):
            self._remember_all(value)
        elif isinstance(value, _OBJECTS):
            self._remember_object(value)

    def _remember_all(self, values: Iterable[Any]) -> None:
        for value in values:
            if type(value) not in _ATOMS:
                self._remember(value)

    def put_back(self) -> None:
        """Make every container hold what it held."""
        for table, before in self.tables:
            if len(table) != len(before) or any(map(_is_not, table.values(), before.values())) or [*table] != [*before]:
                table.clear()
                table.update(before)
        for sequence, items in self.sequences:
            if len(sequence) != len(items) or any(map(_is_not, sequence, items)):
                sequence.clear()
                (sequence.update if isinstance(sequence, set) else sequence.extend)(items)


def _is_not(a: object, b: object) -> bool:
    return a is not b


@dataclass(frozen=True)
class TensorIdentity:
    """What makes a tensor that tensor beside its bytes: class, storage, gradient, requires_grad, tensor hooks."""

    tensor: Tensor
    kind: type
    storage: Tensor
    pointer: int
    grad: Tensor | None
    requires_grad: bool
    hooks: dict[Any, Any] | None

    @classmethod
    def of(cls, tensor: Tensor) -> "TensorIdentity":
        """Remember a tensor."""
        leaf = tensor.grad_fn is None
        hooks = tensor._backward_hooks
        return cls(
            tensor,
            type(tensor),
            tensor.detach(),
            tensor.data_ptr(),
            tensor.grad if leaf else None,
            tensor.requires_grad,
            None if hooks is None else dict(hooks),
        )

    def put_back(self) -> None:
        """Make the tensor what it was, except for its bytes."""
        tensor: Any = self.tensor
        if type(tensor) is not self.kind:
            tensor.__class__ = self.kind
        if (
            tensor.data_ptr() != self.pointer
            or tensor.shape != self.storage.shape
            or tensor.dtype != self.storage.dtype
        ):
            tensor.data = self.storage
        if tensor.grad_fn is not None:
            return
        if tensor.requires_grad != self.requires_grad:
            tensor.requires_grad_(self.requires_grad)
        if tensor.grad is not self.grad:
            tensor.grad = self.grad
        if tensor._backward_hooks is not None and dict(tensor._backward_hooks) != (self.hooks or {}):
            tensor._backward_hooks.clear()
            tensor._backward_hooks.update(self.hooks or {})


class Snapshot:
    """A full copy of a training state; the buffers are allocated at the first ``save`` and reused by the next."""

    def __init__(self, device: torch.device | None = None) -> None:
        """Make an empty snapshot whose copies live on ``device`` (``None``: where the originals live)."""
        self._device = device
        self._buffers: list[Tensor] = []
        self._identities: list[TensorIdentity] = []
        self._structure: Structure | None = None
        self._streams: StreamState | None = None
        self._flags: tuple[Any, ...] = ()
        self._extras: dict[str, dict[str, Any]] = {}

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The copies, for digests and durable checkpoints."""
        return {str(index): buffer for index, buffer in enumerate(self._buffers)}

    def save(self, state: TrainingState) -> "Snapshot":
        """Copy the state."""
        with torch.no_grad():
            self._structure = Structure.of(state)
            self._identities = [TensorIdentity.of(tensor) for tensor in self._structure.tensors]
            sources = local_shards([identity.storage for identity in self._identities])
            self._fit(sources)
            _copy(self._buffers, sources)
        self._streams = state.streams.save()
        self._flags = state.flags.read()
        self._extras = {name: deepcopy(extra.state_dict()) for name, extra in state.extras.items()}
        return self

    def restore(self, state: TrainingState) -> None:
        """Put the state back, in place: the same objects, holding the same bytes."""
        if self._structure is None or self._streams is None:
            raise RuntimeError("restore() before save(): this snapshot holds nothing.")
        with torch.inference_mode(False), torch.no_grad():
            self._structure.put_back()
            for identity in self._identities:
                identity.put_back()
            _copy(local_shards([identity.storage for identity in self._identities]), self._buffers)
        state.flags.restore(self._flags)
        for name, saved in self._extras.items():
            state.extras[name].load_state_dict(deepcopy(saved))
        self._streams.restore()

    def _fit(self, sources: list[Tensor]) -> None:
        """Reuse the buffers that still match their source, allocate the others."""
        spare: dict[tuple[Any, ...], list[Tensor]] = {}
        for buffer in self._buffers:
            spare.setdefault((buffer.shape, buffer.dtype), []).append(buffer)
        for stack in spare.values():
            stack.reverse()
        self._buffers = [
            stack.pop()
            if (stack := spare.get((source.shape, source.dtype)))
            else torch.empty_like(source, device=self._device or source.device, memory_format=torch.preserve_format)
            for source in sources
        ]


def _copy(destinations: list[Tensor], sources: list[Tensor]) -> None:
    """Copy tensor by tensor, as bytes where the dtype has no copy kernel of its own."""
    if destinations:
        torch._foreach_copy_(destinations, sources)
