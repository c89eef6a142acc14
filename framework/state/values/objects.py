"""Contents of user-defined Python objects: attributes, slots and closures, and which states are out of reach."""

import ctypes
import gc
import logging
import random
import re
import sysconfig
import threading
import weakref
from abc import ABC
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from datetime import date, time, timedelta, tzinfo
from decimal import Decimal
from enum import Enum
from functools import cache, partial
from pathlib import PurePath
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    EllipsisType,
    FunctionType,
    GenericAlias,
    MappingProxyType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
    SimpleNamespace,
    UnionType,
)
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from .containers import CONTAINERS


class Native(NamedTuple):
    """Reader and writer of a native (C) state; the reader returns plain values, equal for equal states."""

    read: Callable[[Any], Any]
    write: Callable[[Any, Any], object]


def _read_array(array: Any) -> tuple[str, tuple[int, ...], bytes]:
    return array.dtype.str, array.shape, array.tobytes()


def _write_array(array: Any, saved: tuple[str, tuple[int, ...], bytes]) -> None:
    _, shape, content = saved
    if array.shape != tuple(shape):
        # NumPy's check would reject the array, since other objects refer to it.
        array.resize(shape, refcheck=False)
    if content:  # frombuffer rejects an empty buffer
        np.copyto(array, np.frombuffer(content, array.dtype).reshape(shape))


def _without_arrays(state: Any) -> Any:
    """Return the state of a NumPy bit generator with lists instead of arrays."""
    if isinstance(state, dict):
        return {key: _without_arrays(item) for key, item in state.items()}
    return state.tolist() if isinstance(state, (np.ndarray, np.generic)) else state


def _with_arrays(state: Any, now: Any) -> Any:
    """Return a plain state with arrays in the places where ``now`` has arrays."""
    if isinstance(now, dict):
        return {key: _with_arrays(item, now[key]) for key, item in state.items()}
    return np.array(state, now.dtype) if isinstance(now, np.ndarray) else state


def _read_bits(bits: Any) -> Any:
    return _without_arrays(bits.state)


def _write_bits(bits: Any, saved: Any) -> None:
    bits.state = _with_arrays(saved, bits.state)


def _read_generator(generator: np.random.Generator) -> Any:
    return _read_bits(generator.bit_generator)


def _write_generator(generator: np.random.Generator, saved: Any) -> None:
    _write_bits(generator.bit_generator, saved)


def _read_random_state(generator: np.random.RandomState) -> Any:
    return _without_arrays(generator.get_state(legacy=False))


def _write_random_state(generator: np.random.RandomState, saved: Any) -> None:
    generator.set_state(_with_arrays(saved, generator.get_state(legacy=False)))


def _read_torch(generator: torch.Generator) -> bytes:
    return generator.get_state().numpy().tobytes()


def _write_torch(generator: torch.Generator, saved: bytes) -> None:
    generator.set_state(torch.frombuffer(bytearray(saved), dtype=torch.uint8))


def _write_bytes(value: bytearray, saved: bytes) -> None:
    value[:] = saved


def _write_numbers(value: "array[Any]", saved: bytes) -> None:
    if len(value) * value.itemsize != len(saved):
        del value[:]
        value.frombytes(saved)
    _write_memory(value, saved)


def _read_memory(value: Any) -> bytes:
    return memoryview(value).tobytes()


def _write_memory(value: Any, saved: bytes) -> None:
    view = memoryview(value)
    if not view.readonly and saved:  # an empty view cannot be cast
        view.cast("B")[:] = saved


_KINDS: dict[type, Native] = {
    np.ndarray: Native(_read_array, _write_array),
    np.random.Generator: Native(_read_generator, _write_generator),
    np.random.BitGenerator: Native(_read_bits, _write_bits),
    np.random.RandomState: Native(_read_random_state, _write_random_state),
    random.Random: Native(random.Random.getstate, random.Random.setstate),
    torch.Generator: Native(_read_torch, _write_torch),
    bytearray: Native(bytes, _write_bytes),
    array: Native(_read_memory, _write_numbers),
    memoryview: Native(_read_memory, _write_memory),
}
_NUMBER_OF_C: Any = ctypes.c_int.__base__
# The operating system's generator has no state, and a memory map is a view of a file.
_WITHOUT = (random.SystemRandom, np.memmap)


def kind_of(value: Any) -> Any:
    """Return the class of a value, typed so that mypy accepts it as hashable."""
    return type(value)


def native_of(value: Any) -> Native | None:
    """Return reader and writer of a value's native state, or ``None`` if it has none."""
    native = _of_kind(kind_of(value))
    if native is not None and isinstance(value, np.ndarray) and value.dtype.hasobject:
        return None
    return native


@cache
def _of_kind(kind: type) -> Native | None:
    if issubclass(kind, _WITHOUT):
        return None
    if _is_number_of_c(kind):
        return Native(_read_memory, _write_memory)
    return next((native for base, native in _KINDS.items() if issubclass(kind, base)), None)


def _is_number_of_c(kind: Any) -> bool:
    """Return whether a class of ctypes holds numbers, as in ``multiprocessing.Value``, and no pointers."""
    while issubclass(kind, ctypes.Array):
        kind = kind._type_
    return issubclass(kind, _NUMBER_OF_C) and kind._type_ in "cbBhHiIlLqQfdg?"


def is_array_of_objects(value: Any) -> bool:
    """Return whether a value is a NumPy array of Python objects."""
    return isinstance(value, np.ndarray) and value.dtype == object


def read_native(value: Any) -> Any:
    """Return the native state of a value, or ``None``."""
    native = _of_kind(kind_of(value))
    return None if native is None else native.read(value)


def write_native(value: Any, saved: Any) -> None:
    """Restore a result of :func:`read_native`, if the state of the value differs."""
    native = _of_kind(kind_of(value))
    if native is not None and native.read(value) != saved:
        native.write(value, saved)


ATOMS = frozenset({bool, int, float, complex, str, bytes, type(None), torch.dtype})
LIBRARIES = tuple({sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib")})
"""Folders of the standard library and of installed packages."""
ABSENT: Any = object()
"""Stands for a missing attribute or the value of an empty slot or cell."""
# Besides slots, instances of a Python class contain a header and, unless the interpreter manages these, two references:
# to __dict__ and to weak references. Larger instances have a native (C) state.
_HEADER, _WORD = object.__basicsize__ + 16, 8
_MADE_BY_CLASS = 1 << 9  # Py_TPFLAGS_HEAPTYPE: the type was created at run time, for example by a class statement


class Transient(ABC):  # noqa: B024 - a marker without abstract methods
    """Base of objects on a module that are not part of the training state: no later step reads their contents.

    They are not digested, rolled back, watched or stored. For a third-party class, call
    ``Transient.register(TheirClass)``.
    """


# views, whose underlying dicts referenced_objects() returns
_VIEWS: tuple[type, ...] = (MappingProxyType, type({}.keys()), type({}.values()), type({}.items()))
_CACHED: Any = type(cache(id))
REFERRING = (FunctionType, partial)
_FUNCTIONS = (*REFERRING, MethodType, *_VIEWS)
IMMUTABLE = (
    *(int, float, complex, str, bytes, range, slice, EllipsisType, re.Pattern, date, time, timedelta, tzinfo, Decimal),
    *(Enum, BaseException, np.generic, np.dtype, torch.finfo, torch.iinfo),
)
_CODE = (
    *(
        BuiltinFunctionType,
        type,
        UnionType,
        GenericAlias,
        CodeType,
        ModuleType,
        property,
        PurePath,
        logging.Logger,
        logging.Handler,
    ),
    *(
        weakref.ref,
        weakref.WeakSet,
        weakref.WeakKeyDictionary,
        weakref.WeakValueDictionary,
        type(threading.Lock()),
        type(threading.RLock()),
        torch.device,
        torch.layout,
        torch.memory_format,
    ),
    *(Dataset, DataLoader),  # data, which are only read: a copy could exceed the memory
    Transient,
)
# Functions and objects of these packages are machinery, not state: torch's compilation, tracing and communication, and
# loopscope's own packages, since hooks and experiments declare their state. Locks of processes are no state either. A
# tokenizer resets its settings at each call, and Arrow tables are immutable.
_MACHINERY = (
    *("torch._", "torch.cuda", "torch.distributed", "torch.fx", "torch.jit", "torch.utils.hooks"),
    *("loopscope.checkpoints", "loopscope.console", "loopscope.data", "loopscope.engine"),
    *("loopscope.experiments.grokking", "loopscope.hooks", "loopscope.isolation", "loopscope.runs.runner"),
    *("loopscope.state", "loopscope.tensors", "loopscope.training."),
    *(
        "multiprocessing.synchronize",
        "_multiprocessing",
        "tokenizers",
        "pyarrow",
        "datasets.arrow_dataset",
        "datasets.iterable_dataset",
    ),
)
# A reference to only such a method writes to the container, for example to a log, and reads nothing from it.
_ONLY_WRITES = frozenset({"append", "appendleft", "extend", "add", "write"})
_WITHOUT_SPACE = (*CONTAINERS, *_FUNCTIONS, *IMMUTABLE, *_CODE, Tensor, nn.Module)


def is_code(value: Any) -> bool:
    """Return whether rebuilding the model recreates this value, such as functions, classes, paths, locks, loggers."""
    if isinstance(value, (*_FUNCTIONS, *_CODE)) or _is_machinery(kind_of(value)):
        return not isinstance(value, nn.Module)
    return callable(value) and not isinstance(value, nn.Module) and attributes_of(value) is None


@cache
def _is_machinery(kind: type) -> bool:
    return any(str(base.__module__).startswith(_MACHINERY) for base in kind.__mro__)


def is_frozen(value: Any) -> bool:
    """Return whether a value is a frozen dataclass, which is replaced instead of changed."""
    # The dataclasses module has no public function for this.
    kind: Any = type(value)
    return is_dataclass(value) and bool(kind.__dataclass_params__.frozen)


def attributes_of(value: Any) -> dict[str, Any] | None:
    """Return the ``__dict__`` and slots of an instance of a Python class; ``None`` for other objects.

    Without slots, the result is the object's ``__dict__`` itself. Of a frozen dataclass the result contains the fields:
    other entries of its ``__dict__`` are cached properties.
    """
    if isinstance(value, _WITHOUT_SPACE) or _is_machinery(kind_of(value)):
        return None
    if is_frozen(value):
        return {item.name: getattr(value, item.name) for item in fields(value)}
    slots = _slots(kind_of(value))
    if slots is None:
        return None
    space: dict[str, Any] | None = getattr(value, "__dict__", None)
    if not slots:
        return space
    return {**(space or {}), **_slots_of(value, slots)}


def _slots_of(owner: Any, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: item for name in names if (item := _read(owner, name)) is not ABSENT}


@cache
def _slots(kind: type) -> tuple[str, ...] | None:
    """Return the names of the slots of a Python class, ``None`` for a class with a native (C) state."""
    if kind is CellType:
        return slot_names(kind)
    # SimpleNamespace is a C class, but its only state is its __dict__.
    bases = [base for base in kind.__mro__ if base not in (object, SimpleNamespace)]
    names = slot_names(kind)
    made_by_class = all(base.__flags__ & _MADE_BY_CLASS for base in bases) and kind is not object
    declares = any("__slots__" in vars(base) or "__dict__" in vars(base) for base in kind.__mro__)
    return names if made_by_class and declares and kind.__basicsize__ <= _HEADER + _WORD * len(names) else None


_WRITABLE: dict[type, tuple[str, ...]] = {
    CellType: ("cell_contents",),
    FunctionType: ("__code__", "__defaults__", "__kwdefaults__"),
    partial: ("func", "args", "keywords"),
    BaseException: ("args",),
}
"""Fields of C types that Python code can write."""


@cache
def slot_names(kind: type) -> tuple[str, ...]:
    """Return the names of the slots that classes declare, and of the fields of C types that Python code can write."""
    for base, names in _WRITABLE.items():
        if issubclass(kind, base):
            return names
    declaring = [base for base in kind.__mro__ if base is defaultdict or base.__flags__ & _MADE_BY_CLASS]
    slots = [(name, item) for base in declaring for name, item in vars(base).items()]
    return tuple([name for name, item in slots if isinstance(item, MemberDescriptorType)])


def _read(owner: Any, name: str) -> Any:
    try:
        return getattr(owner, name)
    except (AttributeError, ValueError):  # ValueError: an empty cell
        return ABSENT


def instance_attributes(container: Any) -> dict[str, Any] | None:
    """Return the ``__dict__`` and slots of an instance of a container's subclass; ``None`` if it has neither."""
    space: dict[str, Any] | None = getattr(container, "__dict__", None)
    slots = slot_names(kind_of(container))
    return {**(space or {}), **_slots_of(container, slots)} if slots else space


def write_attributes(owner: Any, attributes: Mapping[str, Any]) -> None:
    """Set the attributes and slots of an object, unless ``attributes`` is its ``__dict__`` itself."""
    space = getattr(owner, "__dict__", None)
    if attributes is space:
        return
    names = slot_names(kind_of(owner))
    _write_slots(owner, names, [attributes.get(name, ABSENT) for name in names])
    if space is not None:
        space.clear()
        space.update({name: value for name, value in attributes.items() if name not in names})


def _write_slots(owner: Any, names: Iterable[str], values: Iterable[Any]) -> None:
    if isinstance(owner, partial):  # its fields are written only together
        state = (*values, vars(owner))
        owner.__setstate__(state)  # type: ignore[attr-defined]  # its stub lacks the method
        return
    for name, value in zip(names, values, strict=True):
        present = _read(owner, name)
        # bypasses a custom __setattr__, which may reject or convert values
        if value is ABSENT and present is not ABSENT:
            object.__delattr__(owner, name)
        elif value is not present:
            object.__setattr__(owner, name, value)


class Slots:
    """The slots of an object, module, container or function, or the fields of a frozen dataclass, as one sequence."""

    def __init__(self, owner: Any, names: tuple[str, ...]) -> None:
        self._owner, self._names = owner, names

    @classmethod
    def of(cls, value: Any) -> "Slots | None":
        """Return the slots of an object that has any, or all fields of a frozen dataclass."""
        names = tuple([item.name for item in fields(value)]) if is_frozen(value) else slot_names(kind_of(value))
        return cls(value, names) if names else None

    def __len__(self) -> int:
        return len(self._names)

    def __iter__(self) -> Iterator[Any]:
        return iter([_read(self._owner, name) for name in self._names])

    def clear(self) -> None:
        """Do nothing: :meth:`extend` overwrites all values."""

    def extend(self, values: Iterable[Any]) -> None:
        """Write the values, in order."""
        _write_slots(self._owner, self._names, values)


def referenced_objects(value: Any) -> tuple[Any, ...]:
    """Return a function's closure, defaults and attributes, a method's object, a partial's arguments, a view's dict.

    Functions of torch and of loopscope count as having none.
    """
    if isinstance(value, MethodType):
        return (value.__self__, value.__func__)
    if isinstance(value, partial):
        return (value.func, value.args, value.keywords, vars(value))
    if isinstance(value, _CACHED):
        return (vars(value),)
    if isinstance(value, _VIEWS):
        # Views have no public reference to their dict: ``mapping`` of keys, values and items is a read-only proxy.
        return tuple(gc.get_referents(value))  # the dict of the view, which its owner may change
    if isinstance(value, BuiltinFunctionType):
        inert = isinstance(value.__self__, (ModuleType, type, type(None))) or value.__name__ in _ONLY_WRITES
        return () if inert else (value.__self__,)
    if isinstance(value, FunctionType) and not is_of_library(value):
        # A wrapper by torch.compile, although its __module__ is that of the function.
        if "_torchdynamo_orig_callable" in vars(value):
            return (vars(value)["_torchdynamo_orig_callable"],)
        references = (value.__closure__, value.__defaults__, value.__kwdefaults__, vars(value))
        return tuple([item for item in references if item])
    return ()


def is_of_library(function: Any) -> bool:
    """Return whether a function is one of torch or loopscope, which count as unchangeable and without references."""
    return str(getattr(function, "__module__", "")).startswith(("torch.", "loopscope."))


def is_opaque(value: Any) -> bool:
    """Return whether a value has a native state that cannot be read, such as an open stream, an iterator, a handle."""
    if type(value) is object or isinstance(value, (*_WITHOUT_SPACE, type(None))):
        return False
    return attributes_of(value) is None and native_of(value) is None and not is_code(value)
