"""What Python objects on modules and optimizers hold: told apart, written as plain values, and put back in place.

A counter, a history or a configuration that a module keeps is as much a part of the training state as a buffer. The
plain form of an attribute is what is digested and what checkpoints store; reading it executes no code.
"""

import logging
import threading
import weakref
from abc import ABC
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import partial
from itertools import chain, count
from pathlib import PurePath
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..registry import qualified
from .digest import described

ATOMS = frozenset({bool, int, float, complex, str, bytes, type(None), torch.dtype})
CONTAINERS = (dict, list, tuple, set, frozenset, deque)
_BUILDERS: dict[str, Callable[[list[Any]], Any]] = {
    **{kind.__name__: kind for kind in (list, tuple, set, frozenset, torch.Size, dict, OrderedDict, Counter)},
    "deque": lambda found: deque(found[1:], maxlen=found[0]),
}
_MUTABLE = (dict, list, set, deque)
_LARGEST = 10_000  # values in one object; what holds more is a data set or somebody's whole program
# nn.Module keeps parameters, buffers and children in these dicts, and finds them by __getattr__.
TABLES = ("_parameters", "_buffers", "_modules")
HOOK_KIND = "_is_full_backward_hook"
"""What a module notes of its backward hooks, and keeps when they are gone, only to refuse hooks of the other kind."""
NATIVE = frozenset(vars(nn.Module()))
"""The attributes that every module has: its tables and hooks, its mode."""
_ABSENT: Any = object()
_PLAIN_SIZE = type("Plain", (), {}).__basicsize__  # larger objects keep something in C beside their __dict__


class Transient(ABC):  # noqa: B024 - it marks, and asks for nothing
    """Base of objects on a module that are no part of the training state: no later step reads what they hold.

    They are not digested, rolled back, watched or stored. For a class that somebody else wrote:
    ``Transient.register(TheirClass)``.
    """


_CODE = (
    *(FunctionType, BuiltinFunctionType, MethodType, partial, type, ModuleType, property, PurePath, logging.Logger),
    *(weakref.ref, type(threading.Lock()), type(threading.RLock()), torch.device, torch.layout, torch.memory_format),
    Transient,
)
_WITHOUT_SPACE = (*CONTAINERS, Tensor, nn.Module, Enum, *_CODE)


def is_code(value: Any) -> bool:
    """Return whether building the model anew makes this value again: functions, classes, paths, locks, loggers."""
    return isinstance(value, _CODE) or (callable(value) and not isinstance(value, nn.Module))


def is_frozen(value: Any) -> bool:
    """Return whether a value is a frozen dataclass, which is another object when it holds something else."""
    # dataclasses has no public way to ask whether a class is frozen.
    kind: Any = type(value)
    return is_dataclass(value) and bool(kind.__dataclass_params__.frozen)


def attributes_of(value: Any) -> dict[str, Any] | None:
    """Return the attributes of an object that holds data and nothing else, ``None`` for any other value.

    Data is plain values, tensors, containers of both, code, and objects like this one. An object that reaches further
    (a trainer, a file, a process group) is not looked into: putting it back would reach beyond the training state.
    """
    space = _space(value)
    return space if space is not None and _is_data([space], set()) else None


def _space(value: Any) -> dict[str, Any] | None:
    """Return the ``__dict__`` of an object whose whole state it is, the fields of a frozen dataclass."""
    if isinstance(value, _WITHOUT_SPACE):
        return None
    if is_frozen(value):  # what else is in its __dict__ are cached properties
        return {item.name: getattr(value, item.name) for item in fields(value)}
    if not hasattr(value, "__dict__"):
        return None
    return vars(value) if type(value).__basicsize__ <= _PLAIN_SIZE else None


def _is_data(values: Iterable[Any], seen: set[int]) -> bool:
    for value in values:
        if type(value) in ATOMS or isinstance(value, (Tensor, Enum, np.generic)) or id(value) in seen:
            continue
        seen.add(id(value))
        space = _space(value)
        if isinstance(value, dict):
            inner: Iterable[Any] = chain(value.keys(), value.values())
        elif isinstance(value, CONTAINERS) or space is not None:
            inner = value if space is None else space.values()
        elif is_code(value):
            continue
        else:
            return False
        if len(seen) > _LARGEST or not _is_data(inner, seen):
            return False
    return True


class PlainForms:
    """Makes the plain forms of values: atoms and tensors stand for themselves, all else is a dict led by its kind.

    What is met again is written once. A value without a plain form stands for itself too, and is found by
    :func:`unstorable`.
    """

    def __init__(self, elsewhere: Mapping[int, str]) -> None:
        """Take the names, by id, of what is stored elsewhere: modules, parameters and buffers of the model."""
        # Ids stay unique here, since the training state keeps alive whatever is written.
        self._names: dict[int, str | int] = {**elsewhere}
        self._numbers = count()

    def table(self, attributes: Mapping[str, Any]) -> dict[str, Any]:
        """Return the plain forms of named values."""
        return {name: self.of(value) for name, value in attributes.items()}

    def of(self, value: Any) -> Any:
        """Return the plain form of a value."""
        if type(value) in ATOMS:
            return value
        if id(value) in self._names:
            return {"again": self._names[id(value)]}
        if isinstance(value, (tuple, frozenset)):  # never numbered: equal constants may or may not be one object
            return {type(value).__name__: self._items(value)}
        if isinstance(value, Enum):
            return {"enum": qualified(type(value)), "member": value.name}
        if isinstance(value, np.generic) and value.dtype.kind in "biuf" and value.itemsize <= 8:
            return {"numpy": value.dtype.str, "value": value.item()}
        space = _outside_the_tree(value) if isinstance(value, nn.Module) else attributes_of(value)
        if space is None and not isinstance(value, (Tensor, *_MUTABLE)):
            return {"code": described(value)} if is_code(value) else value
        self._names[id(value)] = next(self._numbers)
        if isinstance(value, Tensor):
            return {"parameter": value} if isinstance(value, nn.Parameter) else value
        if isinstance(value, dict):
            return {type(value).__name__: [[self.of(key), self.of(item)] for key, item in value.items()]}
        if space is None:
            head = [value.maxlen] if isinstance(value, deque) else []
            return {type(value).__name__: head + self._items(value)}
        return {"object": qualified(type(value)), "attributes": self.table(space)}

    def _items(self, value: Any) -> list[Any]:
        """Return the forms of a container's items, those of a set by description: its order differs by process."""
        # Strings hash differently in every process, unless PYTHONHASHSEED is set.
        in_order = sorted(value, key=described) if isinstance(value, (set, frozenset)) else value
        return [self.of(item) for item in in_order]


class FromPlainForms:
    """Makes values of plain forms, in the order in which the forms were made.

    An object, container or tensor that is there and is of the kind is filled, so that whoever shares it sees the same.
    """

    def __init__(self, elsewhere: Mapping[str, Any], device: torch.device) -> None:
        """Take what is stored elsewhere, by name, and where new tensors go."""
        self._found: dict[str | int, Any] = dict(elsewhere.items())
        self._filled = set(map(id, elsewhere.values()))
        self._device = device
        self._numbers = count()

    def fill(self, attributes: dict[str, Any], table: Mapping[str, Any], names: Collection[str]) -> None:
        """Make those of ``attributes`` that ``names`` lists what they were; code stays what it is."""
        for name in names:
            if name not in table and not is_code(attributes[name]):
                del attributes[name]
        for name, form in table.items():
            value = self.of(form, attributes.get(name, _ABSENT))
            if value is not _ABSENT:
                attributes[name] = value

    def of(self, form: Any, present: Any) -> Any:
        """Return the value of a form; ``present`` is what stands in its place now.

        Raises ``ValueError`` where it cannot be made without what the model built anew lacks.
        """
        if isinstance(form, Tensor):
            return self._tensor(form, present)
        if not isinstance(form, Mapping):
            return form
        kind, content = next(iter(form.items()))
        if kind == "again":
            return self._found[content]
        if kind == "code":
            return present
        if kind == "numpy":
            return np.dtype(content).type(form["value"])
        if kind == "parameter":
            found = self._tensor(content, present)
            return found if isinstance(found, nn.Parameter) else nn.Parameter(found, content.requires_grad)
        if kind == "enum":
            return type(_of_kind(present, content))[form["member"]]
        if kind == "object":
            return self._object(content, form["attributes"], present)
        return self._container(kind, content, present)

    def _tensor(self, form: Tensor, present: Any) -> Tensor:
        number = next(self._numbers)
        found: Tensor
        fits = isinstance(present, Tensor) and (present.shape, present.dtype) == (form.shape, form.dtype)
        if fits and id(present) not in self._filled:
            with torch.no_grad():
                found = present.copy_(form)
        else:
            found = form.detach().clone().to(self._device)
        self._filled.add(id(found))
        self._found[number] = found
        return found

    def _object(self, kind: str, table: Mapping[str, Any], present: Any) -> Any:
        number = next(self._numbers)
        found = self._found[number] = _of_kind(present, kind)
        if is_frozen(found):
            found = self._found[number] = self._frozen(table, found)
            return found
        self.fill(vars(found), table, [*(_outside_the_tree(found) if isinstance(found, nn.Module) else vars(found))])
        return found

    def _frozen(self, table: Mapping[str, Any], present: Any) -> Any:
        """Return what is there, if it is equal, or else another object: many may share what is there."""
        before = {name: getattr(present, name) for name in table}
        found = {
            name: self.of(form, None if isinstance(before[name], _MUTABLE) else before[name])
            for name, form in table.items()
        }
        if described(found) == described(before):
            return present
        # Without __init__, which may check or compute, and without setattr, which a frozen dataclass refuses.
        made = object.__new__(type(present))
        for name, value in found.items():
            object.__setattr__(made, name, value)
        return made

    def _container(self, kind: str, content: list[Any], present: Any) -> Any:
        """Fill the container that is there if it is of the kind, or make another."""
        if type(present).__name__ != kind or id(present) in self._filled:
            present = None
        if present is None and kind not in _BUILDERS:
            raise ValueError(f"the model built anew has no {kind} where there was one")
        if isinstance(present, (tuple, frozenset)) or kind in ("tuple", "frozenset", "Size"):
            items = self._items(content, present)
            named = isinstance(present, tuple) and hasattr(present, "_fields")
            return type(present)(*items) if named else _BUILDERS[kind](items)
        number, content, head = next(self._numbers), content[kind == "deque" :], content[: kind == "deque"]
        if present is None or (head and present.maxlen != head[0]):
            present = _BUILDERS[kind](head)
        self._found[number] = present
        self._filled.add(id(present))
        if isinstance(present, dict):
            before = {**present}
            keys = [self.of(key, _ABSENT) for key, _ in content]
            pairs = zip(keys, content, strict=True)
            refill(present, keys, [self._item(form, before.get(key)) for key, (_, form) in pairs])
        else:
            refill(present, (), self._items(content, present))
        return present

    def _items(self, forms: list[Any], present: Any) -> list[Any]:
        there = [*present] if isinstance(present, (list, tuple, deque)) else []
        there += [_ABSENT] * (len(forms) - len(there))
        return [self._item(form, item) for form, item in zip(forms, there, strict=False)]

    def _item(self, form: Any, present: Any) -> Any:
        if (found := self.of(form, present)) is _ABSENT:
            raise ValueError(f"the model built anew does not have {form['code']} where it was")
        return found


def _of_kind(present: Any, name: str) -> Any:
    """Return what is there if it is of the named class; nothing else can be filled without executing code."""
    if qualified(type(present)) != name:
        raise ValueError(f"the model built anew has a {qualified(type(present))} where a {name} was")
    return present


def refill(container: Any, keys: Collection[Any], values: Collection[Any]) -> None:
    """Make a dict hold these keys and values, another mutable container these values."""
    container.clear()
    if isinstance(container, dict):
        container.update(zip(keys, values, strict=True))
    elif isinstance(container, set):
        container.update(values)
    else:
        container.extend(values)


def _outside_the_tree(module: nn.Module) -> dict[str, Any]:
    """Return all that a module holds that is no child of the model, but of an attribute."""
    return {**own_attributes(module), **{key: vars(module)[key] for key in TABLES}}


def own_attributes(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of a module without its tables of tensors and modules, and without hooks on it."""
    left_out = (*TABLES, HOOK_KIND)
    return {key: value for key, value in vars(module).items() if key not in left_out and not is_hook_table(key, value)}


def is_hook_table(key: str, value: Any) -> bool:
    """Return whether an attribute of a module or an optimizer holds hooks on it."""
    return key.startswith("_") and "_hooks" in key and isinstance(value, dict)
