"""The tripwire: a sweep of identities, pointers, versions and modes that shows most changes within microseconds.

It is a signal of change and never a proof of none: fused optimizers, ``.data`` and NumPy views write without
moving a version. The audit is the proof.
"""

from collections.abc import Callable
from itertools import chain
from operator import attrgetter
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..errors import StateMutationError, listed
from ..state import MODULE_HOOKS, TrainingState, is_sharded, local_shards, nested

_version = attrgetter("_version")
_grad = attrgetter("grad")
_requires_grad = attrgetter("requires_grad")
_tensor_hooks = attrgetter("_backward_hooks")
_training = attrgetter("training")
_hook_tables = attrgetter(*MODULE_HOOKS)
_pointer = Tensor.data_ptr


class WatchList:
    """What to sweep: the containers, the tensors in them, the modules; valid while the containers hold the same.

    Containers that hold nothing but tensors (most ``_parameters`` tables and optimizer states) give their tensors
    directly; from the others they are picked by place.
    """

    def __init__(self, state: TrainingState) -> None:
        self.modules: list[nn.Module] = list(state.model.modules())
        self.parameters = list(state.model.parameters())
        self.optimizer_state = state.optimizer.state
        structure = [vars(module)[name] for module in self.modules for name in ("_parameters", "_buffers", "_modules")]
        hooks = [*chain.from_iterable(map(_hook_tables, self.modules))]
        optimizer_state = [self.optimizer_state, *self.optimizer_state.values()]
        tables = [table for table in structure + hooks if table] + optimizer_state
        pure = [table for table in tables if table and all(isinstance(item, Tensor) for item in table.values())]
        known = set(map(id, pure))
        self.empty = [table for table in structure + hooks if not table]
        self.pure = [table.values() for table in pure]
        self.mixed = [table.values() for table in tables if id(table) not in known]
        self.tensors = (*chain.from_iterable(self.pure),)
        self.others = (*chain.from_iterable(self.mixed),)
        found = [leaf for item in self.others for _, leaf in nested("", item) if isinstance(leaf, Tensor)]
        direct = set(map(id, self.tensors))
        self.buried = [leaf for leaf in found if id(leaf) not in direct]
        self.sharded = any(map(is_sharded, self.parameters))

    def tensor_hooks(self) -> list[int]:
        """Return the number of hooks on each parameter."""
        return [len(hooks or ()) for hooks in map(_tensor_hooks, self.parameters)]


Sweep = tuple[Any, ...]
_OTHERS, _LASTING, _GRADS, _PASSING, _TRAINING, _VERSIONS = range(6)
_POINTERS, _REQUIRES_GRAD, _HANDLES, _OPTIONS, _FLAGS = range(5)
_QUICK_LABELS = {
    _OTHERS: "modules, module hooks or optimizer state",
    _LASTING: "a parameter, a buffer or an optimizer tensor was replaced",
    _GRADS: "a gradient was replaced",
    _PASSING: "the batch, the loss or accumulated gradients were replaced",
    _TRAINING: "the train/eval mode of a module",
}
_REST_LABELS = {
    _REQUIRES_GRAD: "requires_grad of a parameter",
    _OPTIONS: "optimizer hyper-parameters, its groups or the scheduler",
}


class Tripwire:
    """Sweeps the training state; every clean check is the baseline of the next.

    A quick sweep reads the objects in the containers, versions, gradients and modes; a complete one adds data
    pointers, ``requires_grad``, optimizer settings, global flags and hooks: every handle that torch gives out for a
    hook takes the next number, so one number tells whether any was registered.
    """

    def __init__(self, state: TrainingState) -> None:
        self._state = state
        self._watch = WatchList(state)
        self._quick: Sweep = ()
        self._rest: Sweep = ()
        self._swept: list[Tensor] = []
        self._tensor_hooks: list[int] = []

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters of the model as of the last baseline, in its order."""
        return self._watch.parameters

    def begin(self) -> None:
        """Take the baseline of a fire."""
        watch = self._watch
        quick, tensors = self._sweep()
        stale = self._state.optimizer.state is not watch.optimizer_state or any(watch.empty)
        if stale or not (_equal(quick[_OTHERS], watch.others) and _equal(quick[_LASTING], watch.tensors)):
            self._watch = WatchList(self._state)
            quick, tensors = self._sweep()
        self._quick, rest = quick, self._sweep_rest(tensors)
        if stale or self._rest == () or rest[_HANDLES] != self._rest[_HANDLES]:
            self._tensor_hooks = self._watch.tensor_hooks()
        self._rest = rest

    def check(self, culprit: object) -> None:
        """Sweep completely; raises :class:`StateMutationError` that names ``culprit`` and what changed."""
        self.check_quickly(culprit)
        self.check_rest(culprit)

    def check_quickly(self, culprit: object) -> None:
        """Make the quick sweep."""
        try:
            quick, self._swept = self._sweep()
            changes = [] if _equal(quick, self._quick) else self._changes(quick) or ["the set of tensors"]
        except Exception as error:
            raise unreadable(culprit, error) from error
        if changes:
            raise mutation(culprit, changes)

    def check_rest(self, culprit: object) -> None:
        """Add to the quick sweep just made what makes it a complete one."""
        try:
            rest = self._sweep_rest(self._swept)
            differs = not _equal(rest, self._rest) or any(self._watch.empty)
            changes = self._look_closer(rest) if differs else []
        except Exception as error:
            raise unreadable(culprit, error) from error
        if changes:
            raise mutation(culprit, changes)
        self._rest = rest

    def release(self) -> None:
        """Let go of the tensors of the last sweep, so that gradients and batches live no longer than without it."""
        self._quick, self._swept = (), []

    def _sweep(self) -> tuple[Sweep, list[Tensor]]:
        watch = self._watch
        others = (*chain.from_iterable(watch.mixed),)
        lasting = (*chain.from_iterable(watch.pure),)
        grads = (*map(_grad, watch.parameters),)
        passing = self._state.loop.in_flight()
        training = (*map(_training, watch.modules),)
        tensors = [*lasting, *watch.buried, *[grad for grad in grads if grad is not None], *passing]
        if watch.sharded:
            tensors = local_shards(tensors)
        return (others, lasting, grads, passing, training, _column(_version, tensors)), tensors

    def _sweep_rest(self, tensors: list[Tensor]) -> Sweep:
        watch = self._watch
        return (
            _column(_pointer, tensors),
            (*map(_requires_grad, watch.parameters),),
            RemovableHandle.next_id,
            self._options(),
            self._state.flags.read(),
        )

    def _options(self) -> tuple[Any, ...]:
        """Read hyper-parameters, group structure and scheduler position."""
        optimizer = self._state.optimizer
        groups = optimizer.param_groups
        options: list[Any] = [optimizer.state, groups]
        for group in groups:
            options += group.values()
            options += group["params"]
        if self._state.scheduler is not None:
            options += vars(self._state.scheduler).values()
        return (*options,)

    def _changes(self, now: Sweep) -> list[str]:
        """Name what differs from the baseline in a quick sweep."""
        before = self._quick
        changes = [label for part, label in _QUICK_LABELS.items() if not _equal(before[part], now[part])]
        if changes or len(before[_VERSIONS]) != len(now[_VERSIONS]):
            return changes
        return self._differing_tensors(before[_VERSIONS], now[_VERSIONS])

    def _look_closer(self, now: Sweep) -> list[str]:
        """Name what differs in the rest of a complete sweep; handles may have come and gone again."""
        before = self._rest
        changes = [label for part, label in _REST_LABELS.items() if not _equal(before[part], now[part])]
        changes += self._state.flags.differences(before[_FLAGS])
        changes += self._differing_tensors(before[_POINTERS], now[_POINTERS])
        if any(self._watch.empty) or self._watch.tensor_hooks() != self._tensor_hooks:
            changes.append("a hook on a parameter or module")
        return changes

    def _differing_tensors(self, before: tuple[int, ...], now: tuple[int, ...]) -> list[str]:
        if before == now:
            return []
        names = {id(tensor): name for name, tensor in self._state.tensors().items()}
        _, tensors = self._sweep()
        triples = zip(tensors, before, now, strict=True)
        return [names.get(id(tensor), "a tensor of the batch") for tensor, was, is_now in triples if was != is_now]


def unreadable(culprit: object, error: Exception) -> StateMutationError:
    """Make the error for a state that cannot even be compared, which counts as a changed one."""
    return mutation(culprit, [f"it cannot be read any more ({type(error).__name__}: {error})"])


def _column(read: Callable[[Tensor], int], tensors: list[Tensor]) -> tuple[int, ...]:
    """Read one number of every tensor, -1 where there is none: sparse tensors have no pointer, inference no version."""
    try:
        return (*map(read, tensors),)
    except RuntimeError:
        return tuple([_number(read, tensor) for tensor in tensors])


def _number(read: Callable[[Tensor], int], tensor: Tensor) -> int:
    try:
        return read(tensor)
    except RuntimeError:
        return -1


def _equal(before: tuple[Any, ...], now: tuple[Any, ...]) -> bool:
    """Compare by identity first, which the tuple comparison does, then by value.

    Tensors that are other objects count as changed: comparing them either fails here or is truthy only for equal
    one-element tensors, whose pointers then differ.
    """
    try:
        return before == now
    except (RuntimeError, TypeError, ValueError):
        return False


def mutation(culprit: object, changes: list[str]) -> StateMutationError:
    """Make the error that names who changed what."""
    return StateMutationError(
        f"{culprit} may only read, but changed the training state: {listed(changes, 5)}. What changed cannot be "
        "undone, so the run ends here and no checkpoint is written from this state. A hook that experiments on the "
        "state is an InterventionHook, which is rolled back."
    )
