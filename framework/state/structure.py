"""The objects of the training state: which containers and slots hold which, remembered and put back in place."""

from collections import deque
from collections.abc import Container, Iterable, Iterator
from itertools import chain, islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from .attributes import HOOK_KIND, MAX_DEPTH, refill
from .objects import (
    Slots,
    attributes_of,
    instance_attributes,
    is_frozen,
    is_opaque,
    native_of,
    reached_from,
    read_native,
    write_native,
)
from .tensor_identity import addresses, attached, is_uninitialised

OBJECTS = (nn.Module, Optimizer, LRScheduler, torch.amp.GradScaler)
_SUBCLASSED = (dict, list, deque, set, tuple, np.ndarray)
_ATOMS = frozenset({bool, int, float, str, type(None), torch.dtype, torch.device})


class Structure:
    """Containers reachable from some objects, what they hold, and the tensors and objects with a state in C in them.

    Putting a structure back makes every container hold the very objects it held, and every object be of the class
    it was of. What makes a tensor that tensor, and its bytes, are in ``tensor_identity`` and ``guardian``.
    """

    def __init__(self, roots: Iterable[Any], *, excluded: Container[int] = ()) -> None:
        """Walk from ``roots`` (objects, containers or tensors), leaving out what has an id in ``excluded``."""
        self.tensors: list[Tensor] = []
        self.natives: list[Any] = []
        self.opaque: list[Any] = []
        """What keeps a state that is out of reach."""
        self.seen: set[int] = set()
        self._depth = 0
        self._excluded = excluded
        self._tables: list[dict[Any, Any]] = []
        self._sequences: list[Any] = []
        self._objects: list[Any] = []
        self._visit_all(roots)
        self._empty = [container for container in (*self._tables, *self._sequences) if not container]
        self._tables = [table for table in self._tables if table]
        self._values = [table.values() for table in self._tables]
        self._sequences = [sequence for sequence in self._sequences if sequence]
        self._lengths, self._held = self._read_lengths(), self._read()
        self._addresses = addresses(self._held)  # sound, since what is held cannot be freed: no address comes twice

    def _visit_all(self, values: Iterable[Any]) -> None:
        seen, excluded = self.seen, self._excluded
        for value in values:
            kind = type(value)
            if kind not in _ATOMS and id(value) not in seen and id(value) not in excluded:
                # A test of exact type, since isinstance() with Tensor or Parameter asks a metaclass.
                if kind is Tensor and not value.requires_grad:  # most of them; nothing can hang on one
                    seen.add(id(value))
                    self.tensors.append(value)
                else:
                    self._visit(value)

    def _visit(self, value: Any) -> None:
        if self._depth > MAX_DEPTH:
            self.opaque.append(value)
            return
        self._depth += 1
        if isinstance(value, dict):
            self._add(self._tables, value, value.values())
        # A tuple cannot change, but what it holds can.
        elif isinstance(value, (tuple, frozenset)):
            self._visit_all(value)
        elif isinstance(value, (list, deque, set)):
            self._add(self._sequences, value, value)
        elif isinstance(value, Tensor) and not is_uninitialised(value):
            self._add(self.tensors, value, attached(value))
        elif isinstance(value, OBJECTS) or is_uninitialised(value):
            self._add(self._objects, value, (vars(value),))
        else:
            self._visit_object(value)
        if isinstance(value, _SUBCLASSED) and (extra := instance_attributes(value)) is not None:
            self._visit_all((extra,))
        self._depth -= 1

    def _visit_object(self, value: Any) -> None:
        self.seen.add(id(value))
        if native_of(value) is not None:
            self.natives.append(value)
        elif attributes_of(value) is None:
            self._visit_all(reached_from(value))
            self.opaque += [value] if is_opaque(value) else []
        else:
            if (slots := Slots.of(value)) is not None:
                self._sequences.append(slots)
                self._visit_all(slots)
            if hasattr(value, "__dict__") and not is_frozen(value):  # whose __dict__ may get cached properties
                self._add(self._objects, value, (vars(value),))

    def _add(self, found: list[Any], value: Any, contents: Iterable[Any]) -> None:
        self.seen.add(id(value))
        found.append(value)
        self._visit_all(contents)

    def read_natives(self) -> list[Any]:
        """Return the states of the objects whose state lies in C."""
        return [*map(read_native, self.natives)]

    def write_natives(self, states: list[Any]) -> None:
        """Put back what :meth:`read_natives` returned."""
        for value, state in zip(self.natives, states, strict=True):
            write_native(value, state)

    def _read(self) -> tuple[Any, ...]:
        """Return, end to end: values and keys of the tables, items of the sequences, what the objects are."""
        tables, sequences, objects = self._tables, self._sequences, self._objects
        contents = chain.from_iterable(chain(self._values, tables, sequences))
        return (*contents, *map(type, objects), *map(vars, objects))

    def _read_lengths(self) -> list[int]:
        return [*map(len, self._tables), *map(len, self._sequences)]

    def of_kind(self, kind: type) -> list[Any]:
        """List the objects of a class that were found."""
        return [thing for thing in self._objects if isinstance(thing, kind)]

    def containers(self) -> list[Any]:
        """Return the containers, the empty ones too."""
        return [*self._tables, *self._sequences, *self._empty]

    def is_current(self) -> bool:
        """Return whether every container still holds the objects it held."""
        return (
            not any(self._empty)
            and self._lengths == self._read_lengths()
            and self._addresses == addresses(self._read())
        )

    def _contents(self) -> Iterator[tuple[Any, tuple[Any, ...], tuple[Any, ...]]]:
        """Yield every container that held something, with its keys and values (items of a sequence are its values)."""
        entries = sum(self._lengths[: len(self._tables)])
        values, rest = iter(self._held[:entries]), iter(self._held[entries:])
        lengths = iter(self._lengths)
        for table, length in zip(self._tables, lengths, strict=False):
            yield table, (*islice(rest, length),), (*islice(values, length),)
        for sequence, length in zip(self._sequences, lengths, strict=False):
            yield sequence, (), (*islice(rest, length),)

    def _object_identities(self) -> Iterator[tuple[Any, type, dict[str, Any]]]:
        count = len(self._objects)
        identities = self._held[len(self._held) - 2 * count :]
        yield from zip(self._objects, identities[:count], identities[count:], strict=True)

    def changed(self) -> list[Any]:
        """List the objects and containers that are not what they were."""
        found = [container for container in self._empty if container]
        found += [
            thing
            for thing, kind, space in self._object_identities()
            if type(thing) is not kind or vars(thing) is not space
        ]
        return found + [
            container
            for container, *held in self._contents()
            if not _holds(container, *held) and not _has_had_hooks(container, *held)
        ]

    def restore(self) -> None:
        """Make every object and container what it was."""
        if self.is_current():
            return
        for thing, kind, space in self._object_identities():
            if type(thing) is not kind:  # parametrizations and FSDP2 change the class of a module in place
                thing.__class__ = kind
            if vars(thing) is not space:
                thing.__dict__ = space
        for container in self._empty:
            container.clear()
        for container, keys, values in self._contents():
            if not _holds(container, keys, values):
                refill(container, keys, values)


def _has_had_hooks(container: Any, keys: tuple[Any, ...], values: tuple[Any, ...]) -> bool:
    """Return whether all that differs is the note of a module that it had full backward hooks."""
    if not isinstance(container, dict) or HOOK_KIND not in container or addresses((*container,)) != addresses(keys):
        return False
    triples = zip(keys, container.values(), values, strict=True)
    return all(now is was or (key == HOOK_KIND and now is True) for key, now, was in triples)


def _holds(container: Any, keys: tuple[Any, ...], values: tuple[Any, ...]) -> bool:
    if isinstance(container, dict):
        return addresses((*container,)) == addresses(keys) and addresses((*container.values(),)) == addresses(values)
    return addresses((*container,)) == addresses(values)
