"""Attributes of modules and optimizers: classified, written as plain values, and restored in place.

A counter, a history or a configuration on a module is part of the training state, like a buffer. Digests and
checkpoints use the plain form of an attribute; reading it executes no code.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Mapping
from enum import Enum, Flag
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..registry import qualified
from ..tensors import is_uninitialised, is_wrapper
from .digest import described
from .values import (
    ABSENT,
    ATOMS,
    MUTABLE_CONTAINERS,
    attributes_of,
    instance_attributes,
    is_code,
    is_frozen,
    keys_of,
    native_of,
    read_native,
    referenced_objects,
    refill,
    values_of,
    write_attributes,
    write_native,
)


def _deque_of(items: list[Any]) -> deque[Any]:
    """Return a deque, given its ``maxlen``, followed by its items."""
    return deque(items[1:], maxlen=items[0])


_BUILDERS: dict[str, Callable[[list[Any]], Any]] = {
    **{kind.__name__: kind for kind in (list, tuple, set, frozenset, torch.Size, dict, OrderedDict, Counter)},
    "deque": _deque_of,
}
MAX_DEPTH = 100
"""Maximum depth of a walk; deeper objects count as out of reach."""
# nn.Module stores parameters, buffers and children in these dicts, and looks them up in __getattr__.
TABLES = ("_parameters", "_buffers", "_modules")
UNSAVED_BUFFERS = "_non_persistent_buffers_set"
"""A module's set of the names of buffers that ``state_dict`` leaves out."""
HOOK_KIND = "_is_full_backward_hook"
"""A module's flag for the kind of its backward hooks, by which it rejects the other kind, even after removal."""
COMPILED_ID = "_torchdynamo_wrapper_id"
"""The number that ``torch.compile`` gives to modules; it differs when the same model is built again."""
GRAPH_SITE = "_site_in_graphs"
"""The taps on a module in graphs of ``torch.compile``."""
COMPOSABLE_PREFIX = "__composable_api_"
"""Prefix of the attributes with the state of ``fully_shard``, which is a separate part."""
DISTRIBUTED_MARK = "_distribute_module_applied"
"""A flag that ``parallelize_module`` sets; the layout of parameters on ranks is not part of the state."""
MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
"""Attributes that every module has: tables, hooks, mode."""
HOOK_TABLES = tuple(sorted(key for key in MODULE_ATTRIBUTES if key.startswith("_") and "_hooks" in key))


class PlainForms:
    """Writes values in plain form: atoms and tensors unchanged, all others as a dict that starts with the kind.

    Repeated objects are written once. A value without a plain form is also left unchanged; :func:`unstorable_values`
    finds it.
    """

    def __init__(self, elsewhere: Mapping[int, str]) -> None:
        """Create a writer; ``elsewhere`` maps ids of separately stored objects, such as modules, to their names."""
        # Ids stay unique, since the training state keeps all written objects alive.
        self._names: dict[int, str | int] = {**elsewhere}
        self._numbers = count()
        self._depth = 0

    def forms_of(self, attributes: Mapping[str, Any]) -> dict[str, Any]:
        """Return the plain forms of named values."""
        return {name: self.form_of(value) for name, value in attributes.items()}

    def form_of(self, value: Any) -> Any:
        """Return the plain form of a value."""
        if type(value) in ATOMS or self._depth > MAX_DEPTH:
            return value
        if id(value) in self._names:
            return {"again": self._names[id(value)]}
        self._depth += 1
        try:
            return self._form_of_new(value)
        finally:
            self._depth -= 1

    def _form_of_new(self, value: Any) -> Any:
        if isinstance(value, (tuple, frozenset)):  # never numbered: equal constants may or may not be the same object
            return {type(value).__name__: self._forms_of_items(value)} | self._forms_of_attributes(value)
        if isinstance(value, Enum):  # a combination of flags has no name
            return {"enum": qualified(type(value)), "member": value.value if isinstance(value, Flag) else value.name}
        if isinstance(value, np.generic) and value.dtype.kind in "biuf" and value.itemsize <= 8:
            return {"numpy": value.dtype.str, "value": value.item()}
        if not isinstance(value, (Tensor, nn.Module, *MUTABLE_CONTAINERS)) and attributes_of(value) is None:
            if native_of(value) is None:
                return self._form_of_code(value)
            self._names[id(value)] = next(self._numbers)
            return {"native": qualified(type(value)), "state": read_native(value)}
        self._names[id(value)] = next(self._numbers)
        if isinstance(value, Tensor):
            return {"parameter": value} if isinstance(value, nn.Parameter) else value
        if isinstance(value, MUTABLE_CONTAINERS):
            return {type(value).__name__: self._forms_of_content(value)} | self._forms_of_attributes(value)
        return {"object": qualified(type(value)), "attributes": self.forms_of(_object_attributes(value))}

    def _form_of_code(self, value: Any) -> Any:
        if not is_code(value):
            return value
        references = [self.form_of(item) for item in referenced_objects(value)]
        return {"code": described(value)} | ({"holds": references} if references else {})

    def _forms_of_attributes(self, value: Any) -> dict[str, Any]:
        """Return the attributes of a container of a subclass; an OrderedDict has a ``__dict__``, usually empty."""
        extra = instance_attributes(value)
        return {"attributes": self.forms_of(extra)} if extra else {}

    def _forms_of_content(self, value: Any) -> list[Any]:
        if isinstance(value, dict):
            pairs = zip(keys_of(value), values_of(value), strict=True)
            return [[self.form_of(key), self.form_of(item)] for key, item in pairs]
        return ([value.maxlen] if isinstance(value, deque) else []) + self._forms_of_items(value)

    def _forms_of_items(self, value: Any) -> list[Any]:
        """Return the forms of a container's items; those of a set are sorted, since its order differs by process."""
        # Strings hash differently in every process, unless PYTHONHASHSEED is set.
        items = values_of(value)
        in_order = sorted(items, key=described) if isinstance(value, (set, frozenset)) else items
        return [self.form_of(item) for item in in_order]


class FromPlainForms:
    """Restores values from plain forms, in the order in which the forms were written.

    A present object, container or tensor of the same kind is filled in place, so that shared references stay shared.
    """

    def __init__(self, elsewhere: Mapping[str, Any], device: torch.device) -> None:
        """Create a reader; ``elsewhere`` has separately stored objects by name, ``device`` is that of new tensors."""
        self._objects: dict[str | int, Any] = dict(elsewhere.items())
        self._filled = set(map(id, elsewhere.values()))
        self._device = device
        self._numbers = count()

    def restore_attributes(self, attributes: dict[str, Any], table: Mapping[str, Any], names: Collection[str]) -> None:
        """Restore the ``attributes`` that ``names`` lists; code stays unchanged."""
        for name in names:
            if name not in table and not is_code(attributes[name]):
                del attributes[name]
        for name, form in table.items():
            value = self.value_of(form, attributes.get(name, ABSENT))
            if value is not ABSENT:
                attributes[name] = value

    def value_of(self, form: Any, present: Any) -> Any:
        """Return the value of a form; ``present`` is the current value in its place.

        Raises:
            ValueError: if the rebuilt model lacks an object that the value requires.
        """
        if isinstance(form, Tensor):
            return self._tensor(form, present)
        if not isinstance(form, Mapping):
            return form
        kind, content = next(iter(form.items()))
        if kind == "again":
            return self._objects[content]
        if kind == "code":
            self.values_of(form.get("holds", []), [*referenced_objects(present)])
            return present
        if kind == "numpy":
            return np.dtype(content).type(form["value"])
        if kind == "parameter":
            tensor = self._tensor(content, present)
            return tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor, content.requires_grad)
        if kind == "enum":
            kind_of_enum = type(_of_kind(present, content))
            return kind_of_enum(form["member"]) if issubclass(kind_of_enum, Flag) else kind_of_enum[form["member"]]
        if kind in ("object", "native"):
            return self._object(content, form, present)
        return self._container(kind, form, present)

    def _tensor(self, form: Tensor, present: Any) -> Tensor:
        number = next(self._numbers)
        tensor: Tensor
        fits = isinstance(present, Tensor) and (present.shape, present.dtype) == (form.shape, form.dtype)
        if fits and id(present) not in self._filled:
            with torch.no_grad():
                tensor = present.copy_(form)
        else:
            tensor = form.detach().clone().to(self._device)
        self._filled.add(id(tensor))
        self._objects[number] = tensor
        return tensor

    def _object(self, kind: str, form: Mapping[str, Any], present: Any) -> Any:
        number = next(self._numbers)
        target = self._objects[number] = _of_kind(present, kind)
        if "native" in form:
            write_native(target, form["state"])
            return target
        table = form["attributes"]
        if is_frozen(target):
            target = self._objects[number] = self._frozen(table, target)
            return target
        space = attributes_of(target)
        space = vars(target) if space is None else space
        self.restore_attributes(space, table, [*_object_attributes(target)])
        write_attributes(target, space)
        return target

    def _frozen(self, table: Mapping[str, Any], present: Any) -> Any:
        """Return the present object if it is equal, otherwise a new one: the present one may be shared."""
        previous = {name: getattr(present, name) for name in table}
        restored = {
            name: self.value_of(form, None if isinstance(previous[name], MUTABLE_CONTAINERS) else previous[name])
            for name, form in table.items()
        }
        if described(restored) == described(previous):
            return present
        # Without __init__, which may have side effects, and without setattr, which a frozen dataclass rejects.
        made = object.__new__(type(present))
        for name, value in restored.items():
            object.__setattr__(made, name, value)
        return made

    def _container(self, kind: str, form: Mapping[str, Any], present: Any) -> Any:
        """Fill the present container if it is of the same kind, otherwise create one."""
        content = form[kind]
        if type(present).__name__ != kind or id(present) in self._filled:
            present = None
        if present is None and kind not in _BUILDERS:
            raise ValueError(f"the rebuilt model has no {kind} where the stored one has")
        if isinstance(present, (tuple, frozenset)) or kind in ("tuple", "frozenset", "Size"):
            items = self.values_of(content, present)
            made = _BUILDERS[kind](items) if kind in _BUILDERS else _immutable_of(type(present), items)
            self._restore_own_attributes(made, form, present)
            return made
        number, is_deque = next(self._numbers), kind == "deque" or isinstance(present, deque)
        content, head = content[is_deque:], content[:is_deque]
        if present is None:
            present = _BUILDERS[kind](head)
        elif is_deque and present.maxlen != head[0]:
            deque.__init__(present, (), head[0])
        self._objects[number] = present
        self._filled.add(id(present))
        if isinstance(present, dict):
            previous = dict(zip(keys_of(present), values_of(present), strict=True))
            code = {described(key): key for key in previous if is_code(key)}
            forms = [(key, isinstance(key, Mapping) and "code" in key) for key, _ in content]
            keys = [self.value_of(key, code.get(key["code"]) if is_of_code else ABSENT) for key, is_of_code in forms]
            pairs = zip(keys, content, strict=True)
            refill(present, keys, [self._required_value_of(form, previous.get(key)) for key, (_, form) in pairs])
        else:
            refill(present, (), self.values_of(content, present))
        self._restore_own_attributes(present, form, present)
        return present

    def _restore_own_attributes(self, target: Any, form: Mapping[str, Any], present: Any) -> None:
        """Restore the attributes of a container of a subclass, given those of the present one."""
        space = instance_attributes(present)
        if space is not None:
            self.restore_attributes(space, form.get("attributes", {}), [*space])
            write_attributes(target, space)

    def values_of(self, forms: list[Any], present: Any) -> list[Any]:
        """Return the values of forms; ``present`` contains the current values in their places."""
        present_items = [*values_of(present)] if isinstance(present, (list, tuple, deque)) else []
        present_items += [ABSENT] * (len(forms) - len(present_items))
        return [self._required_value_of(form, item) for form, item in zip(forms, present_items, strict=False)]

    def _required_value_of(self, form: Any, present: Any) -> Any:
        if (value := self.value_of(form, present)) is ABSENT:
            raise ValueError(f"the rebuilt model lacks {form['code']} where the stored one has it")
        return value


def _immutable_of(kind: Any, items: list[Any]) -> Any:
    """Return a tuple or frozenset of a subclass without calling its constructor, which may take other arguments."""
    if hasattr(kind, "n_sequence_fields"):  # a named tuple of C code, such as torch.return_types
        return kind(items)
    return (tuple if issubclass(kind, tuple) else frozenset).__new__(kind, items)


def _of_kind(present: Any, name: str) -> Any:
    """Return the present object if it is of the named class; no other can be filled without executing code."""
    if qualified(type(present)) != name:
        raise ValueError(f"the rebuilt model has a {qualified(type(present))} where the stored one has a {name}")
    return present


def _object_attributes(value: Any) -> dict[str, Any]:
    """Return the attributes of an object; of a module or an optimizer without hooks."""
    if isinstance(value, nn.Module):  # a module in an attribute that is not a registered child
        return {**module_attributes(value), **{key: vars(value)[key] for key in TABLES}}
    attributes = attributes_of(value) or {}
    return without_hooks(attributes) if isinstance(value, Optimizer) else attributes


def space_of(tensor: Tensor) -> dict[str, Any] | None:
    """Return the ``__dict__`` of a parameter or buffer, to which a forward pass may write; ``None`` for a wrapper's.

    A wrapper, such as a DTensor, has its inner tensors there, which are restored with its identity.
    """
    return None if is_wrapper(tensor) or is_uninitialised(tensor) else vars(tensor)


def spaces_of_buffers(module: nn.Module) -> list[dict[str, Any]]:
    """Return the ``__dict__`` of every buffer of a module; that of parameters belongs to their identity."""
    buffers = vars(module).get("_buffers") or {}
    return [space for item in buffers.values() if isinstance(item, Tensor) and (space := space_of(item)) is not None]


def tensor_attributes(space: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes of a tensor, given its ``__dict__``, without marks of torch's compiler."""
    return {key: value for key, value in space.items() if not key.startswith("_dynamo")}


def module_attributes(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of a module without hooks and its tables of tensors and modules."""
    left_out = (*TABLES, HOOK_KIND, COMPILED_ID, DISTRIBUTED_MARK, GRAPH_SITE)
    attributes = without_hooks(vars(module)).items()
    return {key: value for key, value in attributes if key not in left_out and not key.startswith(COMPOSABLE_PREFIX)}


def without_hooks(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return attributes without tables of hooks."""
    return {key: value for key, value in attributes.items() if not is_hook_table(key, value)}


def is_hook_table(key: str, value: Any) -> bool:
    """Return whether an attribute of a module or an optimizer is a table of hooks."""
    return key.startswith("_") and "_hooks" in key and isinstance(value, dict)
