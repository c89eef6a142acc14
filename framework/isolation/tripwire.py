"""The tripwire, which detects most changes of the training state in microseconds, and the audit, which detects all.

The tripwire compares identities, pointers, versions and modes. It cannot prove that nothing changed: fused optimizers,
``.data`` and NumPy views write without incrementing a version counter. The audit compares a digest of every byte before
and after every call.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain, filterfalse, islice
from operator import attrgetter, call, is_
from typing import Any

import torch
from torch import Tensor

from ..errors import StateMutationError, library_warnings_ignored, listed
from ..state import Part, TrainingState, Watched, arrays_of, hook_contents
from ..state.values import described_tensor
from ..tensors import PLAIN, addresses, is_shared_memory, local_shards
from .guardian import Objects
from .recorded_bytes import NO_BYTES, RecordedBytes, RecordedEntries
from .watch_list import WatchList, contents_of_batch, same_values, step_tensors

# Autograd counts in-place writes, to reject stale saved tensors; only this private attribute gives the count.
# map() with attrgetter is the fastest reader: 9 µs for 150 tensors, and as long again for their pointers.
_version = attrgetter("_version")
_is_none = partial(is_, None)

Sweep = tuple[Any, ...]


class Tripwire:
    """Sweeps the training state; each successful check becomes the baseline of the next.

    A quick sweep reads the objects in the tables, gradients, batch and losses, and the versions of all tensors. A
    complete sweep adds data pointers, the attributes of modules and optimizer, and plain values: options, flags, modes,
    numbers of hooks.
    """

    def __init__(self, state: TrainingState, parts: Sequence[Part] = ()) -> None:
        """Watch all parts of the state, or only ``parts``."""
        self._state = state
        self._parts = parts
        self.watch = WatchList(state, parts)
        self.quick: Sweep = ()
        """The latest quick sweep, empty without a baseline."""
        self.rest: Sweep = ()
        """The rest of the latest complete sweep, empty without a complete baseline."""
        self._attribute_addresses = b""
        self._swept: list[Tensor] = []
        self._bytes = NO_BYTES
        self._owned: dict[int, bool] = {}
        self._settings: dict[str, Any] = {}
        self._hooks: dict[str, Any] = {}
        self.rewritten = False
        """Whether the last check found writes that left all bytes unchanged."""

    # Ignoring warnings costs 2 µs, so the three methods of every visit do so only in a second call, if a filter has
    # turned a library's warning into an error in the first; other methods ignore warnings from the start.

    def take_baseline(self, *, is_complete: bool = True, is_second: bool = False) -> None:
        """Take the baseline of a visit; without a complete one :meth:`check_rest` does nothing."""
        try:
            if not self.watch.has_equal_keys():
                self.watch = WatchList(self._state, self._parts)
            self.quick, tensors = self._sweep()
            self.rest = self._sweep_rest(tensors) if is_complete else ()
            if not self.watch.is_current(self.quick[0], self.quick[1], *self.rest[:1]):
                self.watch = WatchList(self._state, self._parts)
                self.quick, tensors = self._sweep()
                self.rest = self._sweep_rest(tensors) if is_complete else ()
        except Warning:
            if is_second:
                raise
            with library_warnings_ignored():
                self.take_baseline(is_complete=is_complete, is_second=True)
            return
        self._attribute_addresses = self.watch.attribute_addresses
        self._bytes = NO_BYTES

    def record_bytes(self) -> None:
        """Record digests of the swept tensors, so that a check can compare bytes instead of versions.

        A write that leaves the bytes equal is allowed: ``clip_grad_norm_`` with an infinite limit, used to measure a
        norm, multiplies by 1.
        """
        if self._bytes:
            return
        with library_warnings_ignored():
            modules = self._state.modules
            on_attributes = self.watch.tensors_of(self.watch.read_attributes())
            tensors = (*modules.parameters(), *modules.buffers(), *self._sweep()[1], *on_attributes)
            tensors += (*arrays_of(self._state.loop.batch),)
            self._bytes = RecordedBytes(tensors)
            self._owned = _owned_storages(tensors)
            self._settings, self._hooks = self._state.flags.read_slow(), hook_contents(self._state)

    def check_bytes(self, caller: object) -> None:
        """Raise :class:`StateMutationError` if recorded bytes, any slow setting or any table of hooks differ."""
        if not self._bytes:
            return
        try:
            with library_warnings_ignored():
                changes = self._named([tensor for tensor in self._bytes.changed() if not is_shared_memory(tensor)])
                now = self._state.flags.read_slow()
                changes += [name for name, value in self._settings.items() if now[name] != value]
                # Also tables that were replaced where there were none: reading all of them takes longer than a sweep.
                hooks = hook_contents(self._state)
                changes += [name for name in {**self._hooks, **hooks} if self._hooks.get(name) != hooks.get(name)]
        except Exception as error:
            raise unreadable_state(caller, error) from error
        if changes:
            raise mutation_error(caller, changes)

    def _holds_equal_bytes(self, now: Sweep) -> bool:
        """Return whether only versions differ from the baseline, and the written tensors hold equal bytes."""
        same_objects = all(map(same_values, self.quick[:-1], now[:-1]))
        if not self._bytes or not same_objects or len(self.quick[-1]) != len(now[-1]):
            return False
        triples = zip(self._swept, self.quick[-1], now[-1], strict=True)
        written = [tensor for tensor, old, new in triples if old != new]
        return not self._bytes.changed(written)

    def check_quickly(self, caller: object, *, is_second: bool = False) -> None:
        """Make a quick sweep; raise :class:`StateMutationError`, which names ``caller`` and the changes."""
        try:
            quick, self._swept = self._sweep()
            previous, watch, self.rewritten = self.quick, self.watch, False
            try:
                # Nearly always all objects are the same and no tensor was written to, which a few C calls show.
                has_same_tensors = addresses(quick[0]) == watch.tensor_addresses
                has_same_tables = has_same_tensors and addresses(quick[1]) == watch.other_addresses
                is_same = has_same_tables and quick[2:] == previous[2:]
            except Exception:  # the comparison of two different tensors may raise
                is_same = False
            if is_same or (quick[-1] == previous[-1] and all(map(same_values, previous[:-1], quick[:-1]))):
                return
            self.rewritten = self._holds_equal_bytes(quick)
            changes = [] if self.rewritten else self._changes(quick) or ["the set of tensors"]
        except Exception as error:
            _check_again(self.check_quickly, caller, error, is_second=is_second)
            return
        if changes:
            raise mutation_error(caller, changes)
        self.quick = quick

    def check_rest(self, caller: object, *, is_second: bool = False) -> None:
        """Extend the latest quick sweep to a complete one; raise :class:`StateMutationError` for changes."""
        if not self.rest:
            return
        try:
            rest, previous = self._sweep_rest(self._swept), self.rest
            has_equal_attributes = self._attribute_addresses == self.watch.attribute_addresses
            try:
                has_equal_values = has_equal_attributes or same_values(previous[0], rest[0])
                is_same = has_equal_values and rest[1:] == previous[1:]
            except Exception:  # the comparison of two different tensors may raise
                is_same = False
            changes = [] if is_same and not any(self.watch.empty_views) else self._changes_of_rest(rest)
        except Exception as error:
            _check_again(self.check_rest, caller, error, is_second=is_second)
            return
        if changes:
            raise mutation_error(caller, changes)
        self.rest, self._attribute_addresses = rest, self.watch.attribute_addresses

    def restore_cheaply(self) -> None:
        """Restore what costs little: settings, modes, attributes of modules, hooks on modules, gradients.

        The check that follows reports what could not be restored.
        """
        watch, rest = self.watch, self.rest
        pairs: list[tuple[Any, Any]] = [*zip(watch.tensor_parts, self.quick[2:], strict=False)]
        if rest:
            pairs += zip(watch.getter_parts, self._readings(rest[2]), strict=False)
            pairs += zip(watch.value_parts, rest[4:], strict=False)
        steps: list[Callable[[], object]] = [partial(part.restore, value) for part, value in pairs if part.restore]
        if rest:
            steps.append(partial(watch.restore_attributes, rest[0]))
        for step in steps:
            with suppress(Exception):
                step()

    def release(self) -> None:
        """Drop the results of the last sweep, so that they keep no gradients and batches alive."""
        self.quick, self.rest, self._swept, self._bytes, self._hooks = (), (), [], NO_BYTES, {}

    def _sweep(self) -> tuple[Sweep, list[Tensor]]:
        """Return the contents of tables, the frequently replaced tensors and all versions, with the swept tensors."""
        watch = self.watch
        pure = (*chain.from_iterable(watch.pure_views),)
        mixed = (*chain.from_iterable(watch.mixed_views),)
        frequent = [*map(tuple, map(call, watch.tensor_readers)), *map(step_tensors, watch.step_views)]
        tensors = [*pure, *watch.nested_tensors, *filterfalse(_is_none, chain.from_iterable(frequent))]
        # Writes to the local shard of a DTensor do not increment the version counter of the DTensor itself.
        if watch.sharded:
            tensors = local_shards(tensors)
        try:
            versions = (*map(_version, tensors),)
        except Exception:
            versions = _column(_version, tensors)
        return (pure, mixed, *frequent, versions), tensors

    def _sweep_rest(self, tensors: list[Tensor]) -> Sweep:
        """Return the contents of attributes, the plain values, versions of tensors on attributes, and pointers."""
        watch = self.watch
        attributes = watch.read_attributes()
        try:
            readings = (*map(call, chain.from_iterable(watch.getters)),)
        except Exception:  # a setting cannot be read while it contradicts another
            readings = tuple([_result_or(None, getter) for getter in chain.from_iterable(watch.getters)])
        batch = self._state.loop.batch
        contents = () if type(batch) is Tensor else contents_of_batch(batch)
        values = (watch.read_spaces(), readings, contents, *map(tuple, map(call, watch.value_readers)))
        attribute_tensors = watch.tensors_of(attributes)
        if not attribute_tensors:
            return (attributes, *values, (), _column(Tensor.data_ptr, tensors))
        if watch.sharded:
            attribute_tensors = local_shards(attribute_tensors)
        return (
            attributes,
            *values,
            _column(_version, attribute_tensors),
            _column(Tensor.data_ptr, [*tensors, *attribute_tensors]),
        )

    def _readings(self, flat: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
        """Yield the results of each part's getters."""
        rest = iter(flat)
        for getters in self.watch.getters:
            yield (*islice(rest, len(getters)),)

    def _changes(self, now: Sweep) -> list[str]:
        """Name the differences between a quick sweep and the baseline."""
        previous, watch = self.quick, self.watch
        names = self._state.names()
        tables = zip((watch.pure, watch.mixed), previous, now, strict=False)
        changes = [
            watch.name_of_difference(containers, old, names)
            for containers, old, new in tables
            if not same_values(old, new)
        ]
        frequent = zip((*watch.tensor_parts, *watch.step_parts), previous[2:], now[2:], strict=False)
        changes += [part.label for part, old, new in frequent if not same_values(old, new)]
        if changes or len(previous[-1]) != len(now[-1]):
            return changes
        return self._differing_tensors(previous[-1], now[-1])

    def _changes_of_rest(self, now: Sweep) -> list[str]:
        """Name the differences between the rest of a complete sweep and the baseline."""
        previous, watch = self.rest, self.watch
        changes: list[str] = []
        if not same_values(previous[0], now[0]):
            changes.append(watch.attribute(previous[0], now[0], self._state.names()))
        if place := watch.name_of_difference_in_spaces(previous[1], now[1]):
            changes.append(place)
        if not same_values(previous[3], now[3]):
            changes.append("the contents of the batch")
        readings = zip(watch.getter_parts, self._readings(previous[2]), self._readings(now[2]), strict=True)
        values = zip(watch.value_parts, previous[4:], now[4:], strict=False)
        for part, old, new in chain(readings, values):
            if not same_values(old, new):
                changes += part.differences(old) if part.differences is not None else _names_of(part, old, new)
        attribute_tensors = watch.tensors_of(now[0])
        if not self._moved_with_equal_bytes(previous[-1], now[-1]):
            changes += self._differing_tensors(previous[-1], now[-1], attribute_tensors)
        changes += [] if changes else self._named(_different(attribute_tensors, previous[-2], now[-2]))
        return changes + [
            watch.name_of_difference([container], (), self._state.names()) for container in watch.no_longer_empty()
        ]

    def _moved_with_equal_bytes(self, previous: tuple[Any, ...], now: tuple[Any, ...]) -> bool:
        """Return whether tensors only have other memory, with equal recorded bytes, which no other tensor shared.

        ``p.data = p.data.clone()`` changes nothing that the run reads. A view of a larger storage, which other tensors
        may share, does: a write to one would no longer change the other.
        """
        if len(previous) != len(now) or len(now) != len(self._swept):
            return False
        moved = [tensor for tensor, old, new in zip(self._swept, previous, now, strict=True) if old != new]
        is_equal = all(self._owned.get(id(item)) for item in moved) and not self._bytes.changed(moved)
        self.rewritten = self.rewritten or (is_equal and bool(moved))
        return is_equal

    def _differing_tensors(
        self, previous: tuple[int, ...], now: tuple[int, ...], attribute_tensors: Sequence[Tensor] = ()
    ) -> list[str]:
        """Return the names of tensors whose version or pointer differs: of the quick sweep, then on attributes."""
        return (
            [] if previous == now else self._named(_different([*self._sweep()[1], *attribute_tensors], previous, now))
        )

    def _named(self, changed: list[Tensor]) -> list[str]:
        tensors = self._state.tensors() if changed else {}
        gradients = {f"gradient of {name}": tensor.grad for name, tensor in tensors.items() if tensor.is_leaf}
        tensors = {name: gradient for name, gradient in gradients.items() if gradient is not None} | tensors
        # a sweep reads this rank's shard of a DTensor
        names = {id(part): name for name, tensor in tensors.items() for part in (tensor, *local_shards([tensor]))}
        return [f"{names.get(id(item), 'a tensor of the batch')} ({described_tensor(item)})" for item in changed]


def _names_of(part: Watched, previous: tuple[Any, ...], now: tuple[Any, ...]) -> list[str]:
    """Name the values of a part that differ, or the part."""
    triples = zip(part.names, previous, now, strict=False)
    return [name for name, old, new in triples if old is not new] or [part.label]


def _different(tensors: Iterable[Tensor], previous: tuple[int, ...], now: tuple[int, ...]) -> list[Tensor]:
    """List the tensors whose numbers differ."""
    return [tensor for tensor, old, new in zip(tensors, previous, now, strict=False) if old != new]


def _owned_storages(tensors: Iterable[Tensor]) -> dict[int, bool]:
    """Return, by the ids of tensors, whether each fills a storage that no other of them uses."""
    unique = {id(tensor): tensor for tensor in tensors if tensor.layout is torch.strided and type(tensor) in PLAIN}
    storages = {key: tensor.untyped_storage() for key, tensor in unique.items()}
    uses = Counter(storage.data_ptr() for storage in storages.values())
    return {
        key: uses[storage.data_ptr()] == 1 and storage.nbytes() == unique[key].nbytes
        for key, storage in storages.items()
    }


def _check_again(check: Callable[..., None], caller: object, error: Exception, *, is_second: bool) -> None:
    """Repeat a check without warnings if one has ended it; raise :class:`StateMutationError` for another error."""
    if is_second or not isinstance(error, Warning):
        raise unreadable_state(caller, error) from error
    with library_warnings_ignored():
        check(caller, is_second=True)


def unreadable_state(caller: object, error: Exception) -> StateMutationError:
    """Return the error for an unreadable state, which is treated as modified."""
    return mutation_error(caller, [f"it can no longer be read ({type(error).__name__}: {error})"])


def _column(read: Callable[[Tensor], Any], tensors: list[Tensor]) -> tuple[Any, ...]:
    """Read one number of every tensor, -1 if it has none.

    Sparse tensors have no pointer and inference tensors no version. Subclasses, such as lazily initialised buffers, may
    raise any error, and a table that held only tensors when it was listed may hold other objects now.
    """
    try:
        return (*map(read, tensors),)
    except Exception:
        return tuple([_result_or(-1, read, tensor) for tensor in tensors])


def _result_or(default: Any, function: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except Exception:
        return default


def mutation_error(caller: object, changes: list[str]) -> StateMutationError:
    """Return the error that names the caller and its changes."""
    return StateMutationError(
        f"{caller} may only read, but changed the training state: {listed(changes, 5)}. The change cannot be undone, "
        "so the run ends here and no checkpoint is written from this state. If the hook must modify the state, make it "
        "an InterventionHook; its changes are then rolled back."
    )


class Audit:
    """Compares digests and the identity of every object of the state; does nothing if disabled."""

    def __init__(self, state: TrainingState, parts: Sequence[Part] = (), *, enabled: bool) -> None:
        """Compare all parts of the state, or only ``parts``."""
        self._state = state
        self._parts = parts
        self.enabled = enabled
        self._digests = RecordedEntries()
        self._objects: Objects | None = None
        self._gradients: dict[Tensor, Tensor | None] = {}

    def take_baseline(self) -> None:
        """Compute the digests and record the objects to compare with."""
        if not self.enabled:
            return
        with library_warnings_ignored():
            self._digests = self._read()
            has_gradients = any(part.name == "gradients" for part in self._parts or self._state.parts)
            parameters = self._state.modules.parameters() if has_gradients else ()
            self._gradients = {parameter: parameter.grad for parameter in parameters}
            self._objects = Objects((*self._state.roots(self._parts), self._gradients))

    def check(self, caller: object) -> None:
        """Raise :class:`StateMutationError`, which names ``caller`` and the differences, if the state changed."""
        if self.enabled:
            try:
                with library_warnings_ignored():
                    changes = self._digests.differing(self._read()) or self._replaced_objects()
            except Exception as error:
                raise unreadable_state(caller, error) from error
            if changes:
                raise mutation_error(caller, changes)

    def _read(self) -> RecordedEntries:
        return RecordedEntries(self._state.leaf_values(self._parts))

    def _replaced_objects(self) -> list[str]:
        """Name the objects and gradients that were replaced by equal ones."""
        changed = self._objects.changed() if self._objects is not None else []
        changed += [parameter for parameter, gradient in self._gradients.items() if parameter.grad is not gradient]
        names = self._state.names() if changed else {}
        return [f"{names.get(id(item), 'a container')} (replaced)" for item in changed]
