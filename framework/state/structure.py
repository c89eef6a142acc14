"""The object structure of the training state: saved contents of containers and slots, restored in place."""

from collections import OrderedDict, deque
from collections.abc import Container, Iterable, Iterator
from itertools import chain, filterfalse, islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ..tensors import addresses, attached, is_uninitialised
from .attributes import HOOK_KIND, MAX_DEPTH, spaces_of_buffers
from .values import (
    CONTAINERS,
    IMMUTABLE,
    REFERRING,
    Slots,
    attributes_of,
    is_array_of_objects,
    is_frozen,
    is_of_library,
    is_opaque,
    keys_of,
    native_of,
    read_native,
    referenced_objects,
    refill,
    values_of,
    write_native,
)

OBJECTS = (nn.Module, Optimizer, LRScheduler, torch.amp.GradScaler)
_SUBCLASSED = (*CONTAINERS, np.ndarray, *IMMUTABLE)
_PLAIN = frozenset(CONTAINERS)
"""The classes of containers without attributes."""
_ATOMS = frozenset({bool, int, float, str, type(None), torch.dtype, torch.device})


class ReachableObjects:
    """Containers, tensors and objects that are reachable from some objects."""

    def __init__(self, roots: Iterable[Any], *, excluded: Container[int] = ()) -> None:
        """Walk from ``roots`` (objects, containers or tensors), except objects whose id is in ``excluded``."""
        self.tensors: list[Tensor] = []
        self.natives: list[Any] = []
        """Objects with a native (C) state."""
        self.opaque: list[Any] = []
        """Objects whose state is out of reach."""
        self.seen: set[int] = set()
        self._depth = 0
        self._excluded = excluded
        self._tables: list[dict[Any, Any]] = []
        self._sequences: list[Any] = []
        self._objects: list[Any] = []
        self._visit_all(roots)

    def _visit_all(self, values: Iterable[Any]) -> None:
        seen, excluded = self.seen, self._excluded
        for value in values:
            kind = type(value)
            if kind not in _ATOMS and id(value) not in seen and id(value) not in excluded:
                # Exact types are compared, since isinstance() with Tensor or Parameter calls a metaclass.
                if kind is Tensor and not value.requires_grad:  # most tensors; they cannot have hooks
                    seen.add(id(value))
                    self.tensors.append(value)
                elif kind is dict and not value:
                    seen.add(id(value))
                    self._tables.append(value)
                elif kind is OrderedDict and not value:  # most tables of hooks
                    self._add_empty(value)
                else:
                    self._visit(value)

    def _add_empty(self, table: "OrderedDict[Any, Any]") -> None:
        """Add an empty table and its attributes; the same as :meth:`_visit`, at a quarter of the cost."""
        attributes = vars(table)
        self.seen.add(id(table))
        self._tables.append(table)
        if attributes:
            self._visit(attributes)
        else:
            self.seen.add(id(attributes))
            self._tables.append(attributes)

    def _visit(self, value: Any) -> None:
        if self._depth > MAX_DEPTH:
            self.opaque.append(value)
            return
        self._depth += 1
        if isinstance(value, dict):
            self._add(self._tables, value, values_of(value))
            self._visit_all([key for key in keys_of(value) if type(key) is not str])
        # A tuple cannot change, but its items can.
        elif isinstance(value, (tuple, frozenset)):
            self._visit_all(values_of(value))
        elif isinstance(value, (list, deque, set, Slots)):
            self._add(self._sequences, value, values_of(value))
        elif isinstance(value, Tensor) and not is_uninitialised(value):
            self._add(self.tensors, value, attached(value))
        elif isinstance(value, OBJECTS) or is_uninitialised(value):
            spaces = spaces_of_buffers(value) if isinstance(value, nn.Module) else []
            self._add(self._objects, value, [vars(value), *spaces])
            self._add_slots(value)
        else:
            self._visit_object(value)
        if type(value) not in _PLAIN and isinstance(value, _SUBCLASSED):
            self._visit_all((getattr(value, "__dict__", None),))
            self._add_slots(value)
        self._depth -= 1

    def _add_slots(self, value: Any) -> None:
        if (slots := Slots.of(value)) is not None:
            self._sequences.append(slots)
            self._visit_all(slots)

    def _visit_object(self, value: Any) -> None:
        self.seen.add(id(value))
        if native_of(value) is not None:
            self.natives.append(value)
        elif is_array_of_objects(value):
            self._add(self._sequences, value, values_of(value))
        elif attributes_of(value) is None:
            self._visit_all(referenced_objects(value))
            if isinstance(value, REFERRING) and not is_of_library(value):
                self._add_slots(value)
            self.opaque += [value] if is_opaque(value) else []
        else:
            self._add_slots(value)
            # The __dict__ of a frozen object is left out, since it may get cached properties.
            if hasattr(value, "__dict__") and not is_frozen(value):
                self._add(self._objects, value, (vars(value),))

    def _add(self, objects: list[Any], value: Any, contents: Iterable[Any]) -> None:
        self.seen.add(id(value))
        objects.append(value)
        self._visit_all(contents)

    def of_kind(self, kind: type) -> list[Any]:
        """Return the objects of a class."""
        return [thing for thing in self._objects if isinstance(thing, kind)]


class Structure(ReachableObjects):
    """Reachable containers with their contents, and the classes of reachable objects.

    Restoring puts the same objects back into every container, and restores the class of every object. The identities
    of tensors are restored by ``tensor_identity``, their bytes by ``guardian``.
    """

    def __init__(self, roots: Iterable[Any], *, excluded: Container[int] = ()) -> None:
        """Walk from ``roots``, and save what is found."""
        super().__init__(roots, excluded=excluded)
        self._empty = [*filterfalse(values_of, (*self._tables, *self._sequences))]
        self._tables, self._sequences = [*filter(values_of, self._tables)], [*filter(values_of, self._sequences)]
        self._empty_views, self._items = [*map(values_of, self._empty)], [*map(values_of, self._sequences)]
        self._values, self._keys = [*map(values_of, self._tables)], [*map(keys_of, self._tables)]
        self._lengths, self._saved_contents = self._read_lengths(), self._read()
        self._addresses = addresses(self._saved_contents)  # unique, since referenced objects are not freed

    def read_natives(self) -> list[Any]:
        """Return the states of the objects with a native (C) state."""
        return [*map(read_native, self.natives)]

    def write_natives(self, states: list[Any]) -> None:
        """Restore the result of :meth:`read_natives`."""
        for value, state in zip(self.natives, states, strict=True):
            write_native(value, state)

    def _read(self) -> tuple[Any, ...]:
        """Return, as one tuple: values and keys of tables, items of sequences, types and ``__dict__`` of objects."""
        objects = self._objects
        contents = chain.from_iterable(chain(self._values, self._keys, self._items))
        return (*contents, *map(type, objects), *map(vars, objects))

    def _read_lengths(self) -> list[int]:
        return [*map(len, self._values), *map(len, self._items)]

    def containers(self) -> list[Any]:
        """Return the containers, including empty ones."""
        return [*self._tables, *self._sequences, *self._empty]

    def keys_with_tensors(self) -> list[tuple[Any, ...]]:
        """Return the keys of every dict that has tensors as keys; a write to one changes no value of the dict."""
        return [(*keys,) for keys in self._keys if any(isinstance(key, Tensor) for key in keys)]

    def is_current(self) -> bool:
        """Return whether every container still holds the same objects."""
        return (
            not any(self._empty_views)
            and self._lengths == self._read_lengths()
            and self._addresses == addresses(self._read())
        )

    def _contents(self) -> Iterator[tuple[Any, tuple[Any, ...], tuple[Any, ...]]]:
        """Yield every non-empty container with its saved keys and values (the items of a sequence are values)."""
        # The saved tuple starts with the values of all tables; then come their keys and the items of all sequences.
        entries = sum(self._lengths[: len(self._tables)])
        values, rest = iter(self._saved_contents[:entries]), iter(self._saved_contents[entries:])
        lengths = iter(self._lengths)
        for table, length in zip(self._tables, lengths, strict=False):
            yield table, (*islice(rest, length),), (*islice(values, length),)
        for sequence, length in zip(self._sequences, lengths, strict=False):
            yield sequence, (), (*islice(rest, length),)

    def _object_identities(self) -> Iterator[tuple[Any, type, dict[str, Any]]]:
        count = len(self._objects)
        # The saved tuple ends with the types and then the __dict__ of all objects, as _read() builds it.
        identities = self._saved_contents[len(self._saved_contents) - 2 * count :]
        yield from zip(self._objects, identities[:count], identities[count:], strict=True)

    def changed(self) -> list[Any]:
        """Return the objects and containers that have changed."""
        changed = [container for container in self._empty if values_of(container)]
        changed += [
            thing
            for thing, kind, space in self._object_identities()
            if type(thing) is not kind or vars(thing) is not space
        ]
        return changed + [
            container
            for container, *contents in self._contents()
            if not _holds(container, *contents) and not _differs_only_in_hook_flag(container, *contents)
        ]

    def restore(self) -> None:
        """Restore every object and container."""
        if self.is_current():
            return
        for thing, kind, space in self._object_identities():
            if type(thing) is not kind:  # parametrizations and FSDP2 change the class of a module in place
                thing.__class__ = kind
            if vars(thing) is not space:
                thing.__dict__ = space
        for container in self._empty:
            refill(container, (), ())
        for container, keys, values in self._contents():
            if not _holds(container, keys, values):
                refill(container, keys, values)


def _differs_only_in_hook_flag(container: Any, keys: tuple[Any, ...], values: tuple[Any, ...]) -> bool:
    """Return whether the only difference is a module's flag that it had full backward hooks."""
    if (
        not isinstance(container, dict)
        or HOOK_KIND not in container
        or addresses((*keys_of(container),)) != addresses(keys)
    ):
        return False
    triples = zip(keys, values_of(container), values, strict=True)
    return all(new is old or (key == HOOK_KIND and new is True) for key, new, old in triples)


def _holds(container: Any, keys: tuple[Any, ...], values: tuple[Any, ...]) -> bool:
    is_same = addresses((*values_of(container),)) == addresses(values)
    return is_same and (not isinstance(container, dict) or addresses((*keys_of(container),)) == addresses(keys))
