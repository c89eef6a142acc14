"""The tripwire: a sweep of identities, pointers, versions and modes that shows most changes within microseconds.

It is a signal of change and never a proof of none: fused optimizers, ``.data`` and NumPy views write without
moving a version. The audit is the proof: a digest of every byte before and after every call.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from operator import attrgetter, call
from typing import Any

from torch import Tensor

from ..errors import StateMutationError, listed
from ..state import TrainingState, differing, digest_of, local_shards
from .guardian import Objects
from .warned_checks import unaffected_by_warnings
from .watch_list import WatchList, same_values

# Autograd counts the writes in place, to refuse saved tensors that are stale; torch shows the count nowhere else.
_version = attrgetter("_version")
_pointer = Tensor.data_ptr


Sweep = tuple[Any, ...]


@unaffected_by_warnings("take_baseline", "remember", "check_bytes", "check_quickly", "check_rest")
class Tripwire:
    """Sweeps the training state; every clean check is the baseline of the next.

    A quick sweep reads the objects in the tables, gradients, batch and losses, and the versions of all tensors; a
    complete one adds data pointers, the attributes of modules and optimizer, and plain values: options, flags, modes,
    numbers of hooks.
    """

    def __init__(self, state: TrainingState) -> None:
        self._state = state
        self.watch = WatchList(state)
        self._quick: Sweep = ()
        self._rest: Sweep = ()
        self._attribute_addresses = b""
        self._swept: list[Tensor] = []
        self._bytes: dict[int, tuple[Tensor, int]] = {}
        self._settings: dict[str, Any] = {}
        self.rewritten = False
        """Whether the last check found tensors written to that hold the bytes they held."""

    def take_baseline(self) -> None:
        """Take the baseline of a fire."""
        self._quick, tensors = self._sweep()
        self._rest = self._sweep_rest(tensors)
        if not self.watch.is_current(self._quick[0], self._quick[1], self._rest[0]):
            self.watch = WatchList(self._state)
            self._quick, tensors = self._sweep()
            self._rest = self._sweep_rest(tensors)
        self._attribute_addresses = self.watch.attribute_addresses
        self._bytes = {}

    def remember(self, *, everywhere: bool) -> None:
        """Note what the swept tensors hold: a write that leaves their bytes equal is none, one unseen by torch is one.

        Measuring a norm by ``clip_grad_norm_`` with an infinite limit is such a write: it multiplies by 1. Unless
        ``everywhere``, what lies on an accelerator is left out, as it would have to come to the host.
        """
        if not self._bytes:
            tensors = (*self.watch.parameters, *self._state.model.buffers(), *self._sweep()[1])
            near = [tensor for tensor in tensors if everywhere or tensor.device.type == "cpu"]
            self._bytes = {id(tensor): (tensor, digest_of(tensor)) for tensor in near}
            self._settings = self._state.flags.read_slow()

    def check_bytes(self, culprit: object) -> None:
        """Raise :class:`StateMutationError` if tensors do not hold what was remembered, or any setting differs."""
        if not self._bytes:
            return
        try:
            changes = self._named((tensor, was, digest_of(tensor)) for tensor, was in self._bytes.values())
            now = self._state.flags.read_slow()
            changes += [name for name, was in self._settings.items() if now[name] != was]
        except Exception as error:
            raise unreadable_state(culprit, error) from error
        if changes:
            raise mutation_error(culprit, changes)

    def _holds_the_same(self, now: Sweep) -> bool:
        """Return whether versions alone differ from the baseline, and none of them by a change of bytes."""
        same_objects = all(map(same_values, self._quick[:-1], now[:-1]))
        if not self._bytes or not same_objects or len(self._quick[-1]) != len(now[-1]):
            return False
        triples = zip(self._swept, self._quick[-1], now[-1], strict=True)
        written = [tensor for tensor, was, is_now in triples if was != is_now]
        return all(id(tensor) in self._bytes and self._bytes[id(tensor)][1] == digest_of(tensor) for tensor in written)

    def check_quickly(self, culprit: object) -> None:
        """Make the quick sweep; raises :class:`StateMutationError` that names ``culprit`` and what changed."""
        try:
            quick, self._swept = self._sweep()
            self.rewritten = False
            if self._quick_is_same(quick):
                return
            self.rewritten = self._holds_the_same(quick)
            changes = [] if self.rewritten else self._changes(quick) or ["the set of tensors"]
        except Exception as error:
            raise unreadable_state(culprit, error) from error
        if changes:
            raise mutation_error(culprit, changes)
        self._quick = quick

    def _quick_is_same(self, now: Sweep) -> bool:
        """Return whether a quick sweep read the baseline's objects or equal values, and no tensor was written to."""
        if self.watch.holds(now[0], now[1]) and _equal(now[2:], self._quick[2:]):
            return True
        return all(map(same_values, self._quick[:-1], now[:-1])) and self._quick[-1] == now[-1]

    def _rest_is_same(self, now: Sweep) -> bool:
        """Return the same for the rest of a complete sweep."""
        if self._attribute_addresses != self.watch.attribute_addresses and not same_values(self._rest[0], now[0]):
            return False
        return _equal(now[1:], self._rest[1:])

    def check_rest(self, culprit: object) -> None:
        """Add to the quick sweep just made what makes it a complete one."""
        try:
            rest = self._sweep_rest(self._swept)
            differs = not self._rest_is_same(rest) or any(self.watch.empty)
            changes = self._changes_of_rest(rest) if differs else []
        except Exception as error:
            raise unreadable_state(culprit, error) from error
        if changes:
            raise mutation_error(culprit, changes)
        self._rest, self._attribute_addresses = rest, self.watch.attribute_addresses

    def restore_cheaply(self) -> None:
        """Put back what costs next to nothing: settings, modes, attributes of modules, hooks on them, gradients.

        Whatever cannot be put back is left to the check that follows.
        """
        watch = self.watch
        pairs = (
            *zip(watch.value_parts, self._rest[1:], strict=False),
            *zip(watch.tensor_parts, self._quick[2:], strict=False),
        )
        steps: list[Callable[[], object]] = [partial(part.restore, was) for part, was in pairs if part.restore]
        steps.append(partial(watch.restore_attributes, self._rest[0]))
        for step in steps:
            with suppress(Exception):
                step()

    def release(self) -> None:
        """Let go of what the last sweep read, so that gradients and batches live no longer than without it."""
        self._quick, self._rest, self._swept, self._bytes = (), (), [], {}

    def _sweep(self) -> tuple[Sweep, list[Tensor]]:
        """Return what the tables hold, what was glanced at, and versions, with the tensors of these."""
        watch = self.watch
        pure = (*chain.from_iterable(watch.pure_views),)
        mixed = (*chain.from_iterable(watch.mixed_views),)
        glanced = [*map(tuple, map(call, watch.tensor_readers))]
        passing = [tensor for found in glanced for tensor in found if tensor is not None]
        tensors = [*pure, *watch.nested_tensors, *passing]
        # A DTensor has a version of its own, which writes to its local shard do not move.
        if watch.sharded:
            tensors = local_shards(tensors)
        return (pure, mixed, *glanced, _column(_version, tensors)), tensors

    def _sweep_rest(self, tensors: list[Tensor]) -> Sweep:
        """Return what attributes hold, what was looked at, and pointers."""
        watch = self.watch
        attributes = watch.read_attributes()
        looked = map(tuple, map(call, watch.value_readers))
        beside = watch.tensors_of(attributes)
        if not beside:
            return (attributes, *looked, (), _column(_pointer, tensors))
        if watch.sharded:
            beside = local_shards(beside)
        return (attributes, *looked, _column(_version, beside), _column(_pointer, [*tensors, *beside]))

    def _changes(self, now: Sweep) -> list[str]:
        """Name what differs from the baseline in a quick sweep."""
        before, watch = self._quick, self.watch
        names = self._state.names()
        tables = zip((watch.pure, watch.mixed), before, now, strict=False)
        changes = [watch.place(held, was, names) for held, was, is_now in tables if not same_values(was, is_now)]
        glances = zip(watch.tensor_parts, before[2:], now[2:], strict=False)
        changes += [part.label for part, was, is_now in glances if not same_values(was, is_now)]
        if changes or len(before[-1]) != len(now[-1]):
            return changes
        return self._differing_tensors(before[-1], now[-1])

    def _changes_of_rest(self, now: Sweep) -> list[str]:
        """Name what differs in the rest of a complete sweep."""
        before, watch = self._rest, self.watch
        changes: list[str] = []
        if not same_values(before[0], now[0]):
            changes.append(watch.attribute(before[0], now[0], self._state.names()))
        for part, was, is_now in zip(watch.value_parts, before[1:], now[1:], strict=False):
            if not same_values(was, is_now):
                changes += part.differences(was) if part.differences is not None else [part.label]
        beside = watch.tensors_of(now[0])
        changes += self._differing_tensors(before[-1], now[-1], beside)
        changes += [] if changes else self._named(zip(beside, before[-2], now[-2], strict=False))
        return changes + [watch.place([container], (), self._state.names()) for container in watch.empty if container]

    def _differing_tensors(
        self, before: tuple[int, ...], now: tuple[int, ...], beside: Sequence[Tensor] = ()
    ) -> list[str]:
        """Name the tensors of which a number differs: those of a quick sweep, then those on attributes."""
        return [] if before == now else self._named(zip([*self._sweep()[1], *beside], before, now, strict=False))

    def _named(self, triples: Iterable[tuple[Tensor, int, int]]) -> list[str]:
        changed = [tensor for tensor, was, is_now in triples if was != is_now]
        found = self._state.tensors() if changed else {}
        # of a DTensor, this rank's shard is what was swept
        names = {id(part): name for name, tensor in found.items() for part in (tensor, *local_shards([tensor]))}
        return [names.get(id(tensor), "a tensor of the batch") for tensor in changed]


def unreadable_state(culprit: object, error: Exception) -> StateMutationError:
    """Make the error for a state that cannot even be compared, which counts as a changed one."""
    return mutation_error(culprit, [f"it cannot be read any more ({type(error).__name__}: {error})"])


def _column(read: Callable[[Tensor], int], tensors: list[Tensor]) -> tuple[int, ...]:
    """Read one number of every tensor, -1 where there is none.

    Sparse tensors have no pointer and inference tensors no version. Subclasses, such as lazily initialised buffers, may
    refuse either in their own way, and a table that held only tensors when it was listed may hold something else now.
    """
    try:
        return (*map(read, tensors),)
    except Exception:
        return tuple([_number(read, tensor) for tensor in tensors])


def _number(read: Callable[[Tensor], int], tensor: Tensor) -> int:
    try:
        return read(tensor)
    except Exception:
        return -1


def _equal(before: Sweep, now: Sweep) -> bool:
    """Compare tensors by identity, numbers by value; comparing tensors that are other objects may raise."""
    try:
        return bool(before == now)
    except Exception:
        return False


def mutation_error(culprit: object, changes: list[str]) -> StateMutationError:
    """Make the error that names who changed what."""
    return StateMutationError(
        f"{culprit} may only read, but changed the training state: {listed(changes, 5)}. What changed cannot be "
        "undone, so the run ends here and no checkpoint is written from this state. A hook that experiments on the "
        "state is an InterventionHook, which is rolled back."
    )


@unaffected_by_warnings("take_baseline", "check")
class Audit:
    """Compares digests, and the identity of every object of the state; switched off it does nothing."""

    def __init__(self, state: TrainingState, *, enabled: bool) -> None:
        self._state = state
        self.enabled = enabled
        self._before: dict[str, int] = {}
        self._objects: Objects | None = None
        self._gradients: dict[Tensor, Tensor | None] = {}

    def take_baseline(self) -> None:
        """Take the baseline."""
        if self.enabled:
            self._before = self._state.digest()
            self._gradients = {parameter: parameter.grad for parameter in self._state.model.parameters()}
            self._objects = Objects((*self._state.roots, self._gradients), persistent=False)

    def check(self, culprit: object) -> None:
        """Compare; raises :class:`StateMutationError` that names ``culprit`` and what differs."""
        if self.enabled:
            try:
                changes = differing(self._before, self._state.digest()) or self._replaced_objects()
            except Exception as error:
                raise unreadable_state(culprit, error) from error
            if changes:
                raise mutation_error(culprit, changes)

    def _replaced_objects(self) -> list[str]:
        """Name the objects that hold the same as before, but are others, or hold others."""
        changed = self._objects.changed() if self._objects is not None else []
        changed += [parameter for parameter, gradient in self._gradients.items() if parameter.grad is not gradient]
        names = self._state.names() if changed else {}
        return [f"{names.get(id(item), 'a container')} (replaced)" for item in changed]
