"""The tripwire: a sweep of identities, pointers, versions and modes that shows most changes within microseconds.

It is a signal of change and never a proof of none: fused optimizers, ``.data`` and NumPy views write without
moving a version. The audit is the proof: a digest of every byte before and after every call.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from operator import attrgetter, call, itemgetter
from typing import Any

from torch import Tensor

from ..errors import StateMutationError, listed
from ..state import ATOMS, TrainingState, addresses, differing, digest_of, is_sharded, local_shards, nested
from .guardian import Objects
from .warned_checks import unaffected_by_warnings

# Autograd counts the writes in place, to refuse saved tensors that are stale; torch shows the count nowhere else.
_version = attrgetter("_version")
_pointer = Tensor.data_ptr
_PASSING_BY = (*ATOMS, Tensor)


class WatchList:
    """What to sweep: all that the parts have watched, in flat lists; valid while the containers hold the same.

    Tables that hold nothing but tensors (most ``_parameters`` tables and optimizer states) give their tensors directly;
    from the others they are picked by place.
    """

    def __init__(self, state: TrainingState) -> None:
        self.parameters = [*state.model.parameters()]
        watched = [(part.name, part.watched(state)) for part in state.parts]
        self._owners = {id(item): name for name, part in watched for item in (*part.tables, *part.attributes)}
        self._owners |= {id(space): name for name, part in watched for space, _ in part.own}
        tables = [table for _, part in watched for table in part.tables]
        containers = [container for _, part in watched for container in part.attributes]
        self.empty = [container for container in (*tables, *containers) if not container]
        # Their values go into the flat list by one C call, without a look at each.
        self.pure = [table for table in tables if table and all(isinstance(item, Tensor) for item in table.values())]
        pure = {*map(id, self.pure)}
        self.mixed = [table for table in tables if table and id(table) not in pure]
        self.attributes = [container for container in containers if container]
        self.pure_views, self.mixed_views = _views(self.pure), _views(self.mixed)
        self._attribute_views = _views(self.attributes)
        own = [entry for _, part in watched for entry in part.own]
        self._spaces, self._getters = [space for space, _ in own], [itemgetter(*keys) for _, keys in own]
        self._keys = [(space, key) for space, keys in own for key in keys]
        glanced = [(part.glance, part) for _, part in watched if part.glance is not None]
        looked = [(part.look, part) for _, part in watched if part.look is not None]
        self.glances, self.glanced = [glance for glance, _ in glanced], [part for _, part in glanced]
        self.looks, self.looked = [look for look, _ in looked], [part for _, part in looked]
        settled = [part.look for _, part in watched if part.look is not None and part.settled]
        self._settled = [(look, tuple(look())) for look in settled]
        self.tensors = (*chain.from_iterable(self.pure_views),)
        self.others = (*chain.from_iterable(self.mixed_views),)
        self._tensors, self._others = addresses(self.tensors), addresses(self.others)
        self._containers = _containers(self.read_attributes())
        self._seen = addresses(self.read_attributes())
        self._placed_at, self._places = b"", list[int]()
        found = [leaf for item in self.others for _, leaf in nested("", item) if isinstance(leaf, Tensor)]
        direct = {*map(id, self.tensors)}
        self.buried = [leaf for leaf in found if id(leaf) not in direct]
        self.sharded = any(map(is_sharded, self.parameters))

    def read_attributes(self) -> tuple[Any, ...]:
        """Return how many attributes objects have, those compared, and what the containers that are no tables hold."""
        own = chain.from_iterable(map(call, self._getters, self._spaces))
        return (*map(len, self._spaces), *own, *chain.from_iterable(self._attribute_views))

    def is_current(self, tensors: tuple[Any, ...], others: tuple[Any, ...], attributes: tuple[Any, ...]) -> bool:
        """Return whether what a sweep just read is in the containers of this list; plain values, tensors may change."""
        if any(self.empty) or addresses(tensors) != self._tensors or addresses(others) != self._others:
            return False
        if any([tuple(look()) != before for look, before in self._settled]):
            return False
        # Plain values are new objects at most steps: a difference here calls for a closer look, not yet for a new list.
        now = self._placed_at  # the addresses of ``attributes``, of which the tensors were just asked
        if now != self._seen and addresses(_containers(attributes)) != addresses(self._containers):
            return False
        self._seen = now
        return True

    def tensors_of(self, attributes: tuple[Any, ...]) -> list[Tensor]:
        """Return the tensors in what :meth:`read_attributes` returned."""
        now = addresses(attributes)
        if now != self._placed_at:
            self._placed_at, self._places = now, _places_of_tensors(attributes)
        # asked again, since an address may be that of another object by now
        return [item for place in self._places if isinstance(item := attributes[place], Tensor)]

    def put_back_own(self, before: tuple[Any, ...]) -> None:
        """Give objects back the attributes by name in what :meth:`read_attributes` returned, such as modes."""
        start = len(self._spaces)
        for (space, key), value in zip(self._keys, before[start : start + len(self._keys)], strict=True):
            space[key] = value

    def name(self, container: Any, names: dict[int, str]) -> str:
        """Name a container: by the object that it belongs to, or else by its part."""
        return names.get(id(container), self._owners[id(container)])

    def attribute(self, before: tuple[Any, ...], now: tuple[Any, ...], names: dict[int, str]) -> str:
        """Name the first attribute, or place in a container, that differs in what :meth:`read_attributes` returned."""
        start = len(self._spaces)
        index = _first_difference(before, now)
        if index < start:
            return f"the attributes of {self.name(self._spaces[index], names)}"
        if index < start + len(self._keys):
            space, key = self._keys[index - start]
            return f"{self.name(space, names)}.{key}"
        start += len(self._keys)
        return self.place(self.attributes, before[start:], now[start:], names)

    def place(self, containers: list[Any], before: tuple[Any, ...], now: tuple[Any, ...], names: dict[int, str]) -> str:
        """Name the first place at which what some containers hold, end to end, differs."""
        index = _first_difference(before, now)
        for container in containers:
            if index < len(container):
                name = self.name(container, names)
                return f"{name}.{[*container][index]}" if isinstance(container, dict) else name
            index -= len(container)
        return "a container"


def _first_difference(before: tuple[Any, ...], now: tuple[Any, ...]) -> int:
    pairs = enumerate(zip(before, now, strict=False))
    return next((index for index, (was, is_now) in pairs if was is not is_now), min(len(before), len(now)))


def _views(containers: list[Any]) -> list[Any]:
    return [container.values() if isinstance(container, dict) else container for container in containers]


def _places_of_tensors(values: tuple[Any, ...]) -> list[int]:
    return [place for place, value in enumerate(values) if type(value) not in ATOMS and isinstance(value, Tensor)]


def _containers(values: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple([value for value in values if type(value) not in _PASSING_BY])


Sweep = tuple[Any, ...]


@unaffected_by_warnings("begin", "remember", "check_closely", "check_quickly", "check_rest")
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
        self._swept: list[Tensor] = []
        self._bytes: dict[int, tuple[Tensor, int]] = {}
        self._settings: dict[str, Any] = {}
        self.rewritten = False
        """Whether the last check found tensors written to that hold the bytes they held."""

    def begin(self) -> None:
        """Take the baseline of a fire."""
        try:
            self._quick, tensors = self._sweep()
            self._rest = self._sweep_rest(tensors)
            is_current = self.watch.is_current(self._quick[0], self._quick[1], self._rest[0])
        except KeyError:  # an attribute is gone, such as the forward function that a tap had put in a module's place
            is_current = False
        if not is_current:
            self.watch = WatchList(self._state)
            self._quick, tensors = self._sweep()
            self._rest = self._sweep_rest(tensors)
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
            self._settings = self._state.flags.hidden()

    def check_closely(self, culprit: object) -> None:
        """Raise :class:`StateMutationError` if tensors do not hold what was remembered, or any setting differs."""
        if not self._bytes:
            return
        try:
            changes = self._named((tensor, was, digest_of(tensor)) for tensor, was in self._bytes.values())
            now = self._state.flags.hidden()
            changes += [name for name, was in self._settings.items() if now[name] != was]
        except Exception as error:
            raise unreadable(culprit, error) from error
        if changes:
            raise mutation(culprit, changes)

    def _holds_the_same(self, now: Sweep) -> bool:
        """Return whether versions alone differ from the baseline, and none of them by a change of bytes."""
        if not self._bytes or not _equal(self._quick[:-1], now[:-1]) or len(self._quick[-1]) != len(now[-1]):
            return False
        triples = zip(self._swept, self._quick[-1], now[-1], strict=True)
        written = [tensor for tensor, was, is_now in triples if was != is_now]
        return all(id(tensor) in self._bytes and self._bytes[id(tensor)][1] == digest_of(tensor) for tensor in written)

    def check_quickly(self, culprit: object) -> None:
        """Make the quick sweep; raises :class:`StateMutationError` that names ``culprit`` and what changed."""
        try:
            quick, self._swept = self._sweep()
            self.rewritten = False
            if _equal(quick, self._quick):
                return
            self.rewritten = self._holds_the_same(quick)
            changes = [] if self.rewritten else self._changes(quick) or ["the set of tensors"]
        except Exception as error:
            raise unreadable(culprit, error) from error
        if changes:
            raise mutation(culprit, changes)
        self._quick = quick

    def check_rest(self, culprit: object) -> None:
        """Add to the quick sweep just made what makes it a complete one."""
        try:
            rest = self._sweep_rest(self._swept)
            differs = not _equal(rest, self._rest) or any(self.watch.empty)
            changes = self._look_closer(rest) if differs else []
        except Exception as error:
            raise unreadable(culprit, error) from error
        if changes:
            raise mutation(culprit, changes)
        self._rest = rest

    def put_back(self) -> None:
        """Put back what costs next to nothing: settings, modes, attributes of modules, hooks on them, gradients.

        Whatever cannot be put back is left to the check that follows.
        """
        watch = self.watch
        pairs = (*zip(watch.looked, self._rest[1:], strict=False), *zip(watch.glanced, self._quick[2:], strict=False))
        steps: list[Callable[[], object]] = [partial(part.put_back, was) for part, was in pairs if part.put_back]
        steps.append(partial(watch.put_back_own, self._rest[0]))
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
        glanced = [*map(tuple, map(call, watch.glances))]
        passing = [tensor for found in glanced for tensor in found if tensor is not None]
        tensors = [*pure, *watch.buried, *passing]
        # A DTensor has a version of its own, which writes to its local shard do not move.
        if watch.sharded:
            tensors = local_shards(tensors)
        return (pure, mixed, *glanced, _column(_version, tensors)), tensors

    def _sweep_rest(self, tensors: list[Tensor]) -> Sweep:
        """Return what attributes hold, what was looked at, and pointers."""
        watch = self.watch
        attributes = watch.read_attributes()
        looked = map(tuple, map(call, watch.looks))
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
        changes = [watch.place(held, was, is_now, names) for held, was, is_now in tables if not _equal(was, is_now)]
        glances = zip(watch.glanced, before[2:], now[2:], strict=False)
        changes += [part.label for part, was, is_now in glances if not _equal(was, is_now)]
        if changes or len(before[-1]) != len(now[-1]):
            return changes
        return self._differing_tensors(before[-1], now[-1])

    def _look_closer(self, now: Sweep) -> list[str]:
        """Name what differs in the rest of a complete sweep."""
        before, watch = self._rest, self.watch
        changes: list[str] = []
        if not _equal(before[0], now[0]):
            changes.append(watch.attribute(before[0], now[0], self._state.names()))
        for part, was, is_now in zip(watch.looked, before[1:], now[1:], strict=False):
            if not _equal(was, is_now):
                changes += part.differences(was) if part.differences is not None else [part.label]
        beside = watch.tensors_of(now[0])
        changes += self._differing_tensors(before[-1], now[-1], beside)
        changes += [] if changes else self._named(zip(beside, before[-2], now[-2], strict=False))
        return changes + [watch.name(container, self._state.names()) for container in watch.empty if container]

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


def _equal(before: Any, now: Any) -> bool:
    """Compare by identity first, which the tuple comparison does, then by value.

    Tensors that are other objects count as changed: comparing them either fails here or is truthy only for equal
    one-element tensors, whose pointers then differ.
    """
    try:
        return bool(before == now)
    except (RuntimeError, TypeError, ValueError):
        return False


def mutation(culprit: object, changes: list[str]) -> StateMutationError:
    """Make the error that names who changed what."""
    return StateMutationError(
        f"{culprit} may only read, but changed the training state: {listed(changes, 5)}. What changed cannot be "
        "undone, so the run ends here and no checkpoint is written from this state. A hook that experiments on the "
        "state is an InterventionHook, which is rolled back."
    )


@unaffected_by_warnings("begin", "check")
class Audit:
    """Compares digests, and the identity of every object of the state; switched off it does nothing."""

    def __init__(self, state: TrainingState, *, enabled: bool) -> None:
        self._state = state
        self.enabled = enabled
        self._before: dict[str, int] = {}
        self._objects: Objects | None = None
        self._gradients: dict[Tensor, Tensor | None] = {}

    def begin(self) -> None:
        """Take the baseline."""
        if self.enabled:
            self._before = self._state.digest()
            self._gradients = {parameter: parameter.grad for parameter in self._state.model.parameters()}
            self._objects = Objects((*self._state.roots, self._gradients), lasting=False)

    def check(self, culprit: object) -> None:
        """Compare; raises :class:`StateMutationError` that names ``culprit`` and what differs."""
        if self.enabled:
            try:
                changes = differing(self._before, self._state.digest()) or self._replaced()
            except Exception as error:
                raise unreadable(culprit, error) from error
            if changes:
                raise mutation(culprit, changes)

    def _replaced(self) -> list[str]:
        """Name the objects that hold the same as before, but are others, or hold others."""
        changed = self._objects.changed() if self._objects is not None else []
        changed += [parameter for parameter, gradient in self._gradients.items() if parameter.grad is not gradient]
        names = self._state.names() if changed else {}
        return [f"{names.get(id(item), 'a container')} (replaced)" for item in changed]
