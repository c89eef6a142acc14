"""What a training state is made of: the objects of a run, and the form in which a part of it is described."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from .flags import GlobalFlags
from .objects import attributes_of
from .random_streams import RandomStreams, StreamState
from .sharding import FullSharding
from .tensor_identity import PLAIN

Leaves = Iterable[tuple[str, Any]]


class Stateful(Protocol):
    """Anything with a state of its own that the run depends on: a strategy, an experiment."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state as tensors and plain values."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from what ``state_dict`` returned."""


@dataclass
class LoopState:
    """The loop's own position and accumulators."""

    epoch: int = 0
    step: int = 0
    batch_idx: int | None = None
    batch: Any = None
    loss: Tensor | None = None
    epoch_loss: float | None = None
    running_loss: Tensor | None = None
    running_steps: int = 0
    evaluation: dict[str, float] = field(default_factory=dict)
    evaluated_at: int | None = None
    """The step after which ``evaluation`` was made."""
    gradient_sum: dict[str, Tensor] | None = None
    gradient_steps: int = 0
    step_series: Tensor | None = None
    """Loss and gradient norm of the steps of the epoch (step loop: since SNAPSHOT), one column each, and room for
    more; float64."""
    series_steps: int = 0
    accumulated_grads: dict[str, Tensor] | None = None
    prev_step_grads: dict[str, Tensor] | None = None
    current_grads: dict[str, Tensor] | None = None
    pre_epoch: Any = None
    """The snapshot taken at PRE_EPOCH; handed to nobody, so the guardian need not copy it."""
    loss_scale: float | None = None
    """What the loss of the step was multiplied by for its backward pass (float16 only)."""
    skipped_steps: int = 0
    """Steps whose update was skipped, since their gradients left float16."""
    step_lr: float | Tensor | None = None
    """Learning rate of the first parameter group in the newest step that was not skipped."""
    stopped: bool = False
    reached: dict[str, int] | None = None

    def in_flight(self) -> tuple[Tensor, ...]:
        """Return the tensors that hooks are shown and the loop goes on with: batch, losses, kept gradients."""
        batch = self.batch
        shown = [*batch.values()] if type(batch) is dict else [*batch] if type(batch) is tuple else [batch]
        if not PLAIN.issuperset(map(type, shown)):  # nearly every batch is a tuple or dict of plain tensors
            shown = [] if batch is None else tensors_of(batch)
        for leaf in (self.loss, self.running_loss, self.step_series):
            if leaf is not None:
                shown.append(leaf)
        for vector in (self.gradient_sum, self.accumulated_grads, self.prev_step_grads, self.current_grads):
            if vector:
                shown += vector.values()
        return tuple(shown)

    def state_dict(self) -> dict[str, Any]:
        """Return everything but the batch in flight and the pre-epoch snapshot, which the next epoch renews."""
        return {
            name: value for name, value in vars(self).items() if name not in ("batch", "pre_epoch", "batch_idx", "loss")
        }


def nested(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested dicts and lists with their paths."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from nested(f"{prefix}/{key}", item)
    elif isinstance(value, (list, tuple)) and any(isinstance(item, (Tensor, Mapping, list, tuple)) for item in value):
        for index, item in enumerate(value):
            yield from nested(f"{prefix}/{index}", item)
    else:
        yield prefix, value


MAX_BATCH_OBJECTS = 10_000
"""Objects and containers in one batch; what reaches more is no batch."""


def visited(path: str, value: Any, seen: set[int] | None = None) -> Iterator[tuple[str, Any, bool]]:
    """Yield a value and all that can be reached from it, each with its path and whether it holds others."""
    seen = set() if seen is None else seen
    inner = _contents(value)
    yield path, value, bool(inner)
    if inner and id(value) not in seen and len(seen) < MAX_BATCH_OBJECTS:
        seen.add(id(value))
        for key, item in inner.items():
            yield from visited(f"{path}/{key}", item, seen)


def _contents(value: Any) -> dict[Any, Any] | None:
    if isinstance(value, (list, tuple)):
        return dict(enumerate(value))
    if isinstance(value, Mapping):
        return {**value} if type(value) is dict else {**(attributes_of(value) or {}), **value}
    return attributes_of(value)


def leaves_of(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what holds nothing else, with its path; arrays as tensors on their memory."""
    for name, leaf, holds in visited(path, value):
        if not holds:
            yield name, _on_memory(leaf)


def tensors_of(value: Any) -> list[Tensor]:
    """Return the tensors in a batch."""
    return [leaf for _, leaf, _ in visited("", value) if isinstance(leaf, Tensor)]


def _on_memory(leaf: Any) -> Any:
    """Return a tensor on the memory of an array of numbers, anything else as it is."""
    if not isinstance(leaf, np.ndarray) or not leaf.flags.writeable:
        return leaf
    try:
        return torch.from_numpy(leaf)
    except (TypeError, ValueError):  # texts and objects, or steps backward
        return leaf


def copy_of_batch(batch: Any) -> Any:
    """Return a copy that shares no memory with a batch: of views their part alone, as the whole may be a data set."""
    clones = {id(tensor): tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in tensors_of(batch)}
    return deepcopy(batch, clones)


def with_types(values: Iterable[Any]) -> tuple[Any, ...]:
    """Return values and their types, for comparisons that tell ``tensor(1.0)`` and ``True`` from an equal 1.0."""
    items = (*values,)
    return (*items, *map(type, items))


@dataclass
class StateObjects:
    """The objects of a run that everything in the table is read from, held by reference."""

    model: nn.Module
    optimizer: Optimizer
    streams: RandomStreams
    loop: LoopState = field(default_factory=LoopState)
    scheduler: LRScheduler | None = None
    scaler: torch.amp.GradScaler | None = None
    extras: Mapping[str, Stateful] = field(default_factory=dict)
    flags: GlobalFlags = field(default_factory=GlobalFlags)
    sharding: FullSharding = field(init=False)


@dataclass(frozen=True)
class Guarded:
    """How the guardian copies a part and puts it back, in place.

    Args:
        lasting: objects that live as long as the run; all that hangs on them is walked once, and copied.
        apart: objects on lasting ones that change at most steps, and are kept instead.
        keep: returns what hangs on no lasting object; it is given the tensors of the state that may carry a gradient.
        passing: objects among what is kept that are walked and copied at every save.
        put_back: puts back what was kept, beyond the contents of the walked objects.
        first: it is put back before objects and tensors are, whose putting back it would disturb.
    """

    persistent: Callable[[StateObjects], Iterable[Any]] = lambda state: ()
    excluded: Callable[[StateObjects], Iterable[Any]] = lambda state: ()
    save: Callable[[StateObjects, list[Tensor]], Any] = lambda state, owners: None
    temporary: Callable[[Any], Iterable[Any]] | None = None
    restore: Callable[[StateObjects, list[Tensor], Any], None] = lambda state, owners, saved: None
    restored_first: bool = False


NOT_GUARDED = Guarded()
"""For what hangs on the lasting objects of another part."""


class Watched(NamedTuple):
    """What the tripwire reads of a part, put together anew when one of the containers is another.

    Args:
        tables: dicts whose values are compared after every call, tensors among them by version and pointer too.
        glance: reads tensors that are others at most steps (``None`` for one that is not there), for the same; like
            ``look`` it returns any iterable, best one that C makes, since both are called twice a fire.
        own: the ``__dict__`` of objects, with the names in it, two or more, that are compared once a fire.
        attributes: containers whose contents are compared once a fire.
        look: reads plain values, once a fire.
        settled: what ``look`` reads decides which containers there are to read.
        label: says what differs if ``glance`` or ``look`` does.
        differences: says it more precisely, given what ``look`` read before.
        put_back: makes it what ``look``, or else ``glance``, read before, where that costs next to nothing.
    """

    tables: Sequence[dict[Any, Any]] = ()
    read_tensors: Callable[[], Iterable[Tensor | None]] | None = None
    named_attributes: Sequence[tuple[dict[str, Any], tuple[str, ...]]] = ()
    containers: Sequence[Any] = ()
    read_values: Callable[[], Iterable[Any]] | None = None
    decides_containers: bool = False
    label: str = ""
    differences: Callable[[Any], list[str]] | None = None
    restore: Callable[[Any], object] | None = None


@dataclass(frozen=True)
class Stored:
    """How checkpoints store a part.

    Args:
        read: returns tensors and plain values, by reference; it is given the states of the run's own generators.
        load: puts what was read back into a state that was just built.
        misfit: says in what a stored part is not one of this run, before anything is changed; empty if it is.
    """

    read: Callable[[StateObjects, StreamState], Any]
    load: Callable[[StateObjects, Any], object]
    misfit: Callable[[StateObjects, Any], str] = lambda state, stored: ""


@dataclass(frozen=True)
class Part:
    """One part of the training state.

    Args:
        name: what it is called in checkpoints.
        leaves: yields its tensors and plain values with their names, for the digest.
        guarded: how the guardian copies it.
        watched: what the tripwire reads of it.
        stored: how checkpoints store it; ``None`` for what the process, or building the run, gives again.
    """

    name: str
    leaves: Callable[[StateObjects], Leaves]
    guarded: Guarded = NOT_GUARDED
    watched: Callable[[StateObjects], Watched] = lambda state: Watched()
    stored: Stored | None = None
