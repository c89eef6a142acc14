"""What Python objects on modules and optimizers hold: told apart, written as plain values, and put back in place.

A counter, a history or a configuration that a module keeps is as much a part of the training state as a buffer. The
plain form of an attribute is what is digested and what checkpoints store; reading it executes no code.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Mapping
from enum import Enum
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..registry import qualified
from .digest import described
from .objects import (
    ABSENT,
    ATOMS,
    attributes_of,
    instance_attributes,
    is_code,
    is_frozen,
    native_of,
    reached_from,
    read_native,
    write_attributes,
    write_native,
)

_BUILDERS: dict[str, Callable[[list[Any]], Any]] = {
    **{kind.__name__: kind for kind in (list, tuple, set, frozenset, torch.Size, dict, OrderedDict, Counter)},
    "deque": lambda found: deque(found[1:], maxlen=found[0]),
}
_MUTABLE = (dict, list, set, deque)
MAX_DEPTH = 100
"""How many objects deep a walk goes: what lies deeper counts as out of reach."""
# nn.Module keeps parameters, buffers and children in these dicts, and finds them by __getattr__.
TABLES = ("_parameters", "_buffers", "_modules")
HOOK_KIND = "_is_full_backward_hook"
"""What a module notes of its backward hooks, and keeps when they are gone, only to refuse hooks of the other kind."""
COMPILED_ID = "_torchdynamo_wrapper_id"
"""What ``torch.compile`` counts its modules by: machinery of the process, another for the same model built again."""
COMPOSABLE_PREFIX = "__composable_api_"
"""How the attributes begin in which ``fully_shard`` keeps its state, which is a part of its own."""
DISTRIBUTED_MARK = "_distribute_module_applied"
"""What ``parallelize_module`` notes on modules: how parameters lie on the ranks is no part of their state."""
NATIVE = frozenset(vars(nn.Module()))
"""The attributes that every module has: its tables and hooks, its mode."""
HOOK_TABLES = tuple(sorted(key for key in NATIVE if key.startswith("_") and "_hooks" in key))


class PlainForms:
    """Makes the plain forms of values: atoms and tensors stand for themselves, all else is a dict led by its kind.

    What is met again is written once. A value without a plain form stands for itself too, and is found by
    :func:`unstorable_values`.
    """

    def __init__(self, elsewhere: Mapping[int, str]) -> None:
        """Take the names, by id, of what is stored elsewhere: modules, parameters and buffers of the model."""
        # Ids stay unique here, since the training state keeps alive whatever is written.
        self._names: dict[int, str | int] = {**elsewhere}
        self._numbers = count()
        self._depth = 0

    def table(self, attributes: Mapping[str, Any]) -> dict[str, Any]:
        """Return the plain forms of named values."""
        return {name: self.of(value) for name, value in attributes.items()}

    def of(self, value: Any) -> Any:
        """Return the plain form of a value."""
        if type(value) in ATOMS or self._depth > MAX_DEPTH:
            return value
        if id(value) in self._names:
            return {"again": self._names[id(value)]}
        self._depth += 1
        try:
            return self._of_one(value)
        finally:
            self._depth -= 1

    def _of_one(self, value: Any) -> Any:
        if isinstance(value, (tuple, frozenset)):  # never numbered: equal constants may or may not be one object
            return {type(value).__name__: self._items(value)}
        if isinstance(value, Enum):
            return {"enum": qualified(type(value)), "member": value.name}
        if isinstance(value, np.generic) and value.dtype.kind in "biuf" and value.itemsize <= 8:
            return {"numpy": value.dtype.str, "value": value.item()}
        if not isinstance(value, (Tensor, nn.Module, *_MUTABLE)) and attributes_of(value) is None:
            return self._of_native(value) if native_of(value) is not None else self._of_code(value)
        self._names[id(value)] = next(self._numbers)
        if isinstance(value, Tensor):
            return {"parameter": value} if isinstance(value, nn.Parameter) else value
        if isinstance(value, _MUTABLE):
            extra = instance_attributes(value)  # an OrderedDict has a place for attributes, and none there
            return {type(value).__name__: self._content(value)} | ({"attributes": self.table(extra)} if extra else {})
        return {"object": qualified(type(value)), "attributes": self.table(_object_attributes(value))}

    def _of_code(self, value: Any) -> Any:
        if not is_code(value):
            return value
        held = [self.of(item) for item in reached_from(value)]
        return {"code": described(value)} | ({"holds": held} if held else {})

    def _of_native(self, value: Any) -> Any:
        self._names[id(value)] = next(self._numbers)
        return {"native": qualified(type(value)), "state": read_native(value)}

    def _content(self, value: Any) -> list[Any]:
        if isinstance(value, dict):
            return [[self.of(key), self.of(item)] for key, item in value.items()]
        return ([value.maxlen] if isinstance(value, deque) else []) + self._items(value)

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
            value = self.of(form, attributes.get(name, ABSENT))
            if value is not ABSENT:
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
            self.items(form.get("holds", []), [*reached_from(present)])
            return present
        if kind == "numpy":
            return np.dtype(content).type(form["value"])
        if kind == "parameter":
            found = self._tensor(content, present)
            return found if isinstance(found, nn.Parameter) else nn.Parameter(found, content.requires_grad)
        if kind == "enum":
            return type(_of_kind(present, content))[form["member"]]
        if kind in ("object", "native"):
            return self._object(content, form, present)
        return self._container(kind, form, present)

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

    def _object(self, kind: str, form: Mapping[str, Any], present: Any) -> Any:
        number = next(self._numbers)
        found = self._found[number] = _of_kind(present, kind)
        if "native" in form:
            write_native(found, form["state"])
            return found
        table = form["attributes"]
        if is_frozen(found):
            found = self._found[number] = self._frozen(table, found)
            return found
        space = attributes_of(found)
        space = vars(found) if space is None else space
        self.fill(space, table, [*_object_attributes(found)])
        write_attributes(found, space)
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

    def _container(self, kind: str, form: Mapping[str, Any], present: Any) -> Any:
        """Fill the container that is there if it is of the kind, or make another."""
        content = form[kind]
        if type(present).__name__ != kind or id(present) in self._filled:
            present = None
        if present is None and kind not in _BUILDERS:
            raise ValueError(f"the model built anew has no {kind} where there was one")
        if isinstance(present, (tuple, frozenset)) or kind in ("tuple", "frozenset", "Size"):
            items = self.items(content, present)
            named = isinstance(present, tuple) and hasattr(present, "_fields")
            return type(present)(*items) if named else _BUILDERS[kind](items)
        number, content, head = next(self._numbers), content[kind == "deque" :], content[: kind == "deque"]
        if present is None or (head and present.maxlen != head[0]):
            present = _BUILDERS[kind](head)
        self._found[number] = present
        self._filled.add(id(present))
        if isinstance(present, dict):
            before = {**present}
            code = {described(key): key for key in present if is_code(key)}
            keys = [self.of(key, code.get(key["code"]) if _is_form_of_code(key) else ABSENT) for key, _ in content]
            pairs = zip(keys, content, strict=True)
            refill(present, keys, [self._item(form, before.get(key)) for key, (_, form) in pairs])
        else:
            refill(present, (), self.items(content, present))
        if "attributes" in form:
            self.fill(vars(present), form["attributes"], [*vars(present)])
        return present

    def items(self, forms: list[Any], present: Any) -> list[Any]:
        """Return the values of forms; ``present`` has what stands in their places now."""
        there = [*present] if isinstance(present, (list, tuple, deque)) else []
        there += [ABSENT] * (len(forms) - len(there))
        return [self._item(form, item) for form, item in zip(forms, there, strict=False)]

    def _item(self, form: Any, present: Any) -> Any:
        if (found := self.of(form, present)) is ABSENT:
            raise ValueError(f"the model built anew does not have {form['code']} where it was")
        return found


def _is_form_of_code(form: Any) -> bool:
    return isinstance(form, Mapping) and "code" in form


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


def _object_attributes(value: Any) -> dict[str, Any]:
    """Return what an object holds: a module all but its hooks, an optimizer too."""
    if isinstance(value, nn.Module):  # one that is no child of the model, but hangs on an attribute
        return {**module_attributes(value), **{key: vars(value)[key] for key in TABLES}}
    held = attributes_of(value) or {}
    return without_hooks(held) if isinstance(value, Optimizer) else held


def module_attributes(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of a module without its tables of tensors and modules, and without hooks on it."""
    left_out = (*TABLES, HOOK_KIND, COMPILED_ID, DISTRIBUTED_MARK)
    held = without_hooks(vars(module)).items()
    return {key: value for key, value in held if key not in left_out and not key.startswith(COMPOSABLE_PREFIX)}


def without_hooks(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return attributes without those that hold hooks."""
    return {key: value for key, value in attributes.items() if not is_hook_table(key, value)}


def is_hook_table(key: str, value: Any) -> bool:
    """Return whether an attribute of a module or an optimizer holds hooks on it."""
    return key.startswith("_") and "_hooks" in key and isinstance(value, dict)
