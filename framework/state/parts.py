"""The objects of a run that make up its training state, and the base class of the parts of that state."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from .generators import RandomStreams, StreamState
from .module_group import ModuleGroup, ModuleOrGroup
from .settings import GlobalFlags
from .sharding import FullSharding
from .values import attributes_of

Leaves = Iterable[tuple[str, Any]]


class Stateful(Protocol):
    """An object with a separate state that the run depends on: a strategy, an experiment."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state as tensors and plain values."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that ``state_dict`` returned."""


@dataclass
class LoopState:
    """Position and accumulators of the training loop."""

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
    """The step after which ``evaluation`` was measured."""
    has_unreported_evaluation: bool = False
    """Whether no hook has reported ``evaluation`` yet."""
    gradient_sum: dict[str, Tensor] | None = None
    gradient_steps: int = 0
    step_series: Tensor | None = None
    """Losses (row 0) and gradient norms (row 1) of the epoch's steps (step loop: since SNAPSHOT), with spare columns;
    float64, shape (2, capacity)."""
    series_steps: int = 0
    accumulated_grads: dict[str, Tensor] | None = None
    prev_step_grads: dict[str, Tensor] | None = None
    current_grads: dict[str, Tensor] | None = None
    pre_epoch: Any = None
    """The state copy taken at PRE_EPOCH, or at the start of an interval of the step loop. Hooks never receive it, so
    the guardian need not copy it."""
    loss_scale: float | None = None
    """Factor of the step's loss in its backward pass (float16 only)."""
    skipped_steps: int = 0
    """Number of steps that were skipped because their gradients overflowed in float16."""
    step_lr: float | Tensor | None = None
    """Learning rate of the first parameter group in the latest step that was not skipped."""
    stopped: bool = False
    reached: dict[str, int] | None = None

    def update_mean_loss(self) -> None:
        """Set the mean loss since the start of the epoch or interval, if it has a step."""
        if self.running_loss is not None:
            self.epoch_loss = float(self.running_loss) / self.running_steps

    def state_dict(self) -> dict[str, Any]:
        """Return everything except what belongs to a step, and the pre-epoch state copy, which is taken again."""
        of_step = ("batch", "pre_epoch", "batch_idx", "loss")
        return {name: value for name, value in vars(self).items() if name not in of_step}


_LEAVES = frozenset({bool, int, float, str, type(None), Tensor})


def nested(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested dicts and lists with their paths."""
    if type(value) in _LEAVES:  # most values; isinstance() with Mapping takes longer than the rest
        yield prefix, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from nested(f"{prefix}/{key}", item)
    elif isinstance(value, (list, tuple)) and any(isinstance(item, (Tensor, Mapping, list, tuple)) for item in value):
        for index, item in enumerate(value):
            yield from nested(f"{prefix}/{index}", item)
    else:
        yield prefix, value


MAX_BATCH_OBJECTS = 10_000
"""Maximum number of objects and containers that are visited in a batch."""


def visited(path: str, value: Any, seen: set[int] | None = None) -> Iterator[tuple[str, Any, bool]]:
    """Yield a value and everything reachable from it, each with its path and whether it contains other values."""
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
    """Yield the values that contain no others, with their paths; arrays as tensors on the same memory."""
    for name, leaf, holds in visited(path, value):
        if not holds:
            yield name, _on_memory(leaf)


def tensors_of(value: Any) -> list[Tensor]:
    """Return the tensors in a batch."""
    return [leaf for _, leaf, _ in visited("", value) if isinstance(leaf, Tensor)]


def arrays_of(value: Any) -> list[Tensor]:
    """Return tensors on the memory of the numeric arrays in a batch."""
    arrays = [leaf for _, leaf, _ in visited("", value) if isinstance(leaf, np.ndarray)]
    return [memory for memory in map(_on_memory, arrays) if isinstance(memory, Tensor)]


def _on_memory(leaf: Any) -> Any:
    """Return a tensor that shares the memory of a numeric array, other arrays as values, anything else unchanged."""
    if not isinstance(leaf, np.ndarray):
        return leaf
    try:
        if leaf.flags.writeable:
            return torch.from_numpy(leaf)
    except (TypeError, ValueError):  # arrays of texts or objects, or with negative strides
        pass
    return leaf.dtype.str, leaf.shape, leaf.tolist() if leaf.dtype.hasobject else leaf.tobytes()


def copy_of_batch(batch: Any) -> Any:
    """Return a deep copy of a batch; views are copied without their base tensor, which may be the whole data set."""
    clones = {id(tensor): tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in tensors_of(batch)}
    return deepcopy(batch, clones)


@dataclass
class StateObjects:
    """References to the objects of a run from which all parts are read."""

    model: nn.Module
    optimizer: Optimizer
    streams: RandomStreams
    loop: LoopState = field(default_factory=LoopState)
    scheduler: LRScheduler | None = None
    scaler: torch.amp.GradScaler | None = None
    extras: Mapping[str, Stateful] = field(default_factory=dict)
    flags: GlobalFlags = field(default_factory=GlobalFlags)
    also: dict[str, nn.Module] = field(default_factory=dict)
    """Other modules that the loss or hooks can reach, by the prefix of their names."""
    sharding: FullSharding = field(init=False)
    _listed: ModuleGroup | None = field(init=False, default=None, repr=False)

    @property
    def modules(self) -> ModuleOrGroup:
        """The model, together with the other modules if there are any."""
        if self._listed is not None:
            return self._listed
        return ModuleGroup(self.model, self.also) if self.also else self.model

    @contextmanager
    def modules_listed(self) -> Iterator[None]:
        """Walk the modules once for all parts that the body reads, instead of twenty times."""
        previous, self._listed = self._listed, ModuleGroup(self.model, self.also)
        try:
            yield
        finally:
            self._listed = previous


class Watched(NamedTuple):
    """The values of a part that the tripwire compares; built again when one of the containers was replaced.

    The tripwire reads them twice per visit, so functions here should be implemented in C: after a training step,
    which evicts the processor's caches, the first call of a Python function takes up to 2 µs.

    Args:
        tables: dicts whose values are compared after every call, tensors among them also by version and pointer.
        read_tensors: returns tensors that are replaced on most steps (``None`` for a missing one), compared in the same
            way.
        step_tensors: a dict with tensors, batches and lists of tensors of the current step, compared in the same way.
        named_attributes: the ``__dict__`` of objects, each with the two or more names whose values are compared once
            per visit.
        containers: containers whose contents are compared once per visit.
        spaces: dicts whose values are compared by value and type once per visit.
        read_values: returns plain values that are compared once per visit.
        getters: functions that return one such value each; one that raises counts as ``None``.
        key: functions that return one value each, on which ``containers`` and ``getters`` depend; called at the start
            of a visit.
        refresh: called at the start of a visit if a value of ``key`` has changed; returns whether ``containers`` are
            still complete. It may replace the functions in ``getters``.
        label: names the difference if one of the values differs.
        names: names of the results of ``getters`` or ``read_values``, of which those that differ are reported.
        differences: names the differences more precisely, given the earlier results of ``getters`` or ``read_values``.
        restore: restores the earlier results of ``getters``, ``read_values`` or ``read_tensors``, if that costs little.
            It is called only after a call raised; a change by a call that returned is an error.
    """

    tables: Sequence[dict[Any, Any]] = ()
    read_tensors: Callable[[], Iterable[Tensor | None]] | None = None
    step_tensors: dict[str, Any] | None = None
    named_attributes: Sequence[tuple[dict[str, Any], tuple[str, ...]]] = ()
    containers: Sequence[Any] = ()
    spaces: Sequence[dict[str, Any]] = ()
    read_values: Callable[[], Iterable[Any]] | None = None
    getters: Sequence[Callable[[], Any]] = ()
    key: Sequence[Callable[[], Any]] = ()
    refresh: Callable[[], bool] | None = None
    label: str = ""
    names: Sequence[str] = ()
    differences: Callable[[Any], list[str]] | None = None
    restore: Callable[[Any], object] | None = None


class Part:
    """One part of the training state; subclasses override the verbs that apply to it.

    ``read`` yields the entries of the digest. The guardian copies the part with ``persistent`` and ``keep`` and rolls
    it back with ``restore``. ``watch`` returns what the tripwire compares. Checkpoints use ``store``, ``load`` and
    ``misfit`` of the parts that have them; other parts are recreated when the process starts or the run is built.
    """

    name: str
    """Its name in checkpoints."""
    has_temporary = False
    """Whether :meth:`keep` returns objects that :meth:`temporary` lists."""
    restored_first = False
    """Whether :meth:`restore` must run before objects and tensors are restored, either because it would overwrite them,
    or because they cannot be restored without it."""

    @property
    def is_stored(self) -> bool:
        """Whether checkpoints contain the part."""
        return type(self).store is not Part.store

    def read(self, state: StateObjects) -> Leaves:
        """Yield the tensors and plain values of the part with their names."""
        return ()

    def persistent(self, state: StateObjects) -> Iterable[Any]:
        """Return objects that live as long as the run; everything reachable from them is walked once and copied."""
        return ()

    def excluded(self, state: StateObjects) -> Iterable[Any]:
        """Return objects reachable from persistent ones that change on most steps; the walk leaves them out."""
        return ()

    def keep(self, state: StateObjects, owners: list[Tensor]) -> Any:
        """Return the state that no persistent object holds; ``owners`` are the tensors that may carry a gradient."""

    def temporary(self, kept: Any) -> Iterable[Any]:
        """Return the objects in a result of :meth:`keep`, or the result itself, to walk and copy at every save."""
        return (kept,)

    def restore(self, state: StateObjects, owners: list[Tensor], kept: Any) -> None:
        """Restore a result of :meth:`keep`, beyond the contents of the walked objects."""

    def watch(self, state: StateObjects) -> Watched:
        """Return the values that the tripwire compares."""
        return Watched()

    def store(self, state: StateObjects, streams: StreamState) -> Any:
        """Return tensors and plain values for a checkpoint, by reference; ``streams`` are the run's generators."""

    def load(self, state: StateObjects, stored: Any) -> None:
        """Restore a result of :meth:`store` in a state that was just built."""

    def misfit(self, state: StateObjects, stored: Any) -> str:
        """Return why a stored part does not fit this run, before anything is changed; empty if it fits."""
        return ""
