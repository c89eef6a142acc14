"""The tripwire: a sweep of identities, pointers, versions and modes that shows most changes within microseconds.

It is a signal of change and never a proof of none: fused optimizers, ``.data`` and NumPy views write without
moving a version. The audit is the proof.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter, is_
from typing import Any

from torch import Tensor, nn

from framework.errors import StateMutationError
from framework.param_vectors import local_shards
from framework.training_state import MODULE_HOOKS, TrainingState, nested

_version = attrgetter("_version")
_grad = attrgetter("grad")
_requires_grad = attrgetter("requires_grad")
_tensor_hooks = attrgetter("_backward_hooks")
_training = attrgetter("training")
_hook_tables = attrgetter(*MODULE_HOOKS)
_pointer = Tensor.data_ptr


class WatchList:
    """The containers and tensors to sweep; valid as long as the containers hold the same objects."""

    def __init__(self, state: TrainingState) -> None:
        self.modules: list[nn.Module] = list(state.model.modules())
        tables = [getattr(module, name) for module in self.modules for name in ("_parameters", "_buffers", "_modules")]
        hooks = [*chain.from_iterable(map(_hook_tables, self.modules))]
        self._optimizer = state.optimizer
        self._optimizer_state = optimizer_state = state.optimizer.state
        self.tables = [table for table in tables if table] + [hook for hook in hooks if hook]
        self.tables += [optimizer_state, *optimizer_state.values()]
        self.empty = [table for table in tables + hooks if not table]
        self.contents = self.read_contents()
        self.parameters = list(state.model.parameters())
        lasting = {id(item): item for item in chain(self.parameters, state.model.buffers())}
        for table in optimizer_state.values():
            lasting |= {id(leaf): leaf for _, leaf in nested("", table) if isinstance(leaf, Tensor)}
        self.lasting = list(lasting.values())

    def read_contents(self) -> tuple[Any, ...]:
        """Return every object in the containers."""
        return (*chain.from_iterable(map(dict.values, self.tables)),)

    def is_current(self) -> bool:
        """Tell whether the containers still hold the objects they held."""
        if self._optimizer.state is not self._optimizer_state:
            return False
        now = self.read_contents()
        return len(now) == len(self.contents) and all(map(is_, now, self.contents)) and not any(self.empty)


@dataclass
class Sweep:
    """What one sweep saw; two sweeps are equal if nothing visible changed between them."""

    grads: tuple[Tensor | None, ...]
    passing: list[Tensor]
    versions: list[int]
    pointers: list[int]
    requires_grad: list[bool]
    tensor_hooks: list[Any]
    training: list[bool]
    options: list[Any]
    flags: tuple[Any, ...]


class Tripwire:
    """Sweeps the training state; every clean check is the baseline of the next."""

    def __init__(self, state: TrainingState) -> None:
        self._state = state
        self._watch = WatchList(state)
        self._before: Sweep | None = None

    def begin(self) -> None:
        """Take the baseline of a fire."""
        if not self._watch.is_current():
            self._watch = WatchList(self._state)
        self._before = self._sweep()

    def check(self, culprit: str) -> None:
        """Sweep again; raises :class:`StateMutationError` that names ``culprit`` and what changed."""
        before = self._before
        assert before is not None, "check() before begin()"
        changes = [] if self._watch.is_current() else ["parameters, buffers, modules, module hooks or optimizer state"]
        if not changes:
            changes = self._compare(before, self._sweep())
        if changes:
            raise mutation(culprit, changes)

    def _sweep(self) -> Sweep:
        watch, loop = self._watch, self._state.loop
        grads = (*map(_grad, watch.parameters),)
        passing = [grad for grad in grads if grad is not None]
        passing += _tensors_of(loop.batch)
        passing += [leaf for leaf in (loop.loss, loop.running_loss) if leaf is not None]
        for vector in (loop.gradient_sum, loop.accumulated_grads, loop.prev_step_grads, loop.current_grads):
            if vector:
                passing += vector.values()
        shards = local_shards(watch.lasting + passing)
        return Sweep(
            grads,
            passing,
            list(map(_version, shards)),
            list(map(_pointer, shards)),
            list(map(_requires_grad, watch.parameters)),
            list(map(_tensor_hooks, watch.parameters)),
            list(map(_training, watch.modules)),
            self._options(),
            self._state.flags.read(),
        )

    def _options(self) -> list[Any]:
        """Read hyper-parameters, group structure and scheduler position."""
        options: list[Any] = [self._state.optimizer.param_groups]
        for group in self._state.optimizer.param_groups:
            options += group.values()
            options += group["params"]
        if self._state.scheduler is not None:
            options += vars(self._state.scheduler).values()
        return options

    def _compare(self, before: Sweep, now: Sweep) -> list[str]:
        changes = []
        if not _same(before.grads, now.grads):
            changes.append("a gradient was replaced")
        elif not _same(before.passing, now.passing):
            changes.append("the batch, the loss or accumulated gradients were replaced")
        elif before.versions != now.versions or before.pointers != now.pointers:
            changes += self._changed_tensors(before, now)
        if before.requires_grad != now.requires_grad:
            changes.append("requires_grad of a parameter")
        if not _same(before.tensor_hooks, now.tensor_hooks):
            changes.append("a hook on a parameter")
        if before.training != now.training:
            changes.append("the train/eval mode of a module")
        if not _same(before.options, now.options) and not _equal(before.options, now.options):
            changes.append("optimizer hyper-parameters, its groups or the scheduler")
        if before.flags != now.flags:
            changes += self._state.flags.differences(before.flags)
        return changes

    def _changed_tensors(self, before: Sweep, now: Sweep) -> list[str]:
        names = {id(tensor): name for name, tensor in self._state.tensors().items()}
        tensors = self._watch.lasting + before.passing
        old = zip(before.versions, before.pointers, strict=True)
        new = zip(now.versions, now.pointers, strict=True)
        pairs = zip(tensors, old, new, strict=True)
        return [names.get(id(tensor), "a tensor of the batch") for tensor, was, is_now in pairs if was != is_now]


def mutation(culprit: str, changes: list[str]) -> StateMutationError:
    """Make the error that names who changed what."""
    shown = ", ".join(changes[:5]) + (f" and {len(changes) - 5} more" if len(changes) > 5 else "")
    return StateMutationError(
        f"{culprit} may only read, but changed the training state: {shown}. What changed cannot be undone, so the run "
        "ends here and no checkpoint is written from this state. A hook that experiments on the state is an "
        "InterventionHook, which is rolled back."
    )


def _tensors_of(batch: Any) -> Iterable[Tensor]:
    if isinstance(batch, Tensor):
        return (batch,)
    return [leaf for _, leaf in nested("", batch) if isinstance(leaf, Tensor)] if batch is not None else ()


def _same(before: Any, now: Any) -> bool:
    return len(before) == len(now) and all(map(is_, before, now))


def _equal(before: list[Any], now: list[Any]) -> bool:
    """Compare plain values by value; tensors and containers count as changed when they are other objects."""
    return len(before) == len(now) and all(
        a is b or (type(a) is type(b) and isinstance(a, (bool, int, float, str, tuple)) and a == b)
        for a, b in zip(before, now, strict=True)
    )
