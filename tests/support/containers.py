"""Containers and objects of all kinds that a module may keep, each with changes that its methods or fields allow."""

import ctypes
import itertools
import multiprocessing
from array import array
from collections import ChainMap, Counter, OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, Flag
from functools import partial
from heapq import heappush
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch


class Point(NamedTuple):
    """A named tuple that holds a list."""

    x: int
    seen: list[int]


class Pair(tuple[Any, ...]):
    """A tuple with attributes, whose constructor takes two arguments."""

    def __new__(cls, first: Any, second: Any) -> "Pair":
        return super().__new__(cls, (first, second))


class Doubling(dict[Any, Any]):
    """A dict that stores twice the value, shows no items and cannot be cleared or updated."""

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, 2 * value)

    def update(self, *_: Any, **__: Any) -> None:
        raise TypeError("no update")

    clear = update  # type: ignore[assignment]

    def items(self) -> Any:
        return ()

    keys = values = items

    def __iter__(self) -> Any:
        return iter(())

    def __len__(self) -> int:
        return 0


class Logging(list[Any]):
    """A list that appends twice and shows its items in another order."""

    def extend(self, items: Any) -> None:
        super().extend([*items, "extended"])

    def clear(self) -> None:
        super().append("cleared")

    def __iter__(self) -> Any:
        return reversed(self)

    def __bool__(self) -> bool:
        return False


class Refusing(set[Any]):
    """A set that refuses to be emptied or updated."""

    def clear(self) -> None:
        raise TypeError("no clear")

    def update(self, *_: Any) -> None:
        raise TypeError("no update")


class Recent(deque[Any]):
    """A deque with an attribute."""

    label = "recent"


class SlottedDict(dict[Any, Any]):
    """A dict with a slot."""

    __slots__ = ("hits",)


@dataclass
class Record:
    """A dataclass that contains a list."""

    total: float = 0.0
    seen: list[Any] = field(default_factory=list)


class Level(Enum):
    """An enumeration whose members have attributes."""

    LOW = 1
    HIGH = 2


class Parts(Flag):
    """A flag whose combinations have no name."""

    HEAD = 1
    BODY = 2


class Steps(int):
    """A number with an attribute."""


def of_model_output() -> Any:
    from transformers.modeling_outputs import BaseModelOutput

    return BaseModelOutput(last_hidden_state=torch.zeros(2), attentions=None)


def with_key(mapping: Any, key: Any, value: Any = 5) -> Any:
    mapping[key] = value


def scale_key(table: dict[Any, Any]) -> None:
    next(iter(table)).mul_(2)


CONTAINERS: dict[str, tuple[Callable[[], Any], tuple[Callable[[Any], Any], ...]]] = {
    "dict": (lambda: {"a": 1, 2: [3]}, (lambda kept: with_key(kept, "b"), lambda kept: kept[2].append(4))),
    "OrderedDict": (lambda: OrderedDict(a=1, b=2), (lambda kept: kept.move_to_end("a"), lambda kept: kept.pop("a"))),
    "Counter": (lambda: Counter([2, 4, 4]), (lambda kept: kept.update([2]), lambda kept: kept.clear())),
    "defaultdict": (lambda: defaultdict(list, a=[1]), (lambda kept: kept["b"], lambda kept: kept["a"].append(2))),
    "list": (lambda: [1, [2]], (lambda kept: kept.append(3), lambda kept: kept[1].clear())),
    "heap": (lambda: [(1, "a"), (3, "b")], (lambda kept: heappush(kept, (2, "c")),)),
    "set": (lambda: {1, "a"}, (lambda kept: kept.add(2), lambda kept: kept.clear())),
    "deque": (lambda: deque([1, 2], 2), (lambda kept: kept.append(3), lambda kept: kept.rotate())),
    "subclass of deque": (lambda: Recent([1, 2], 3), (lambda kept: kept.append(3),)),
    "attribute of a deque": (lambda: Recent([1], 3), (lambda kept: setattr(kept, "label", "new"),)),
    "ChainMap": (lambda: ChainMap({"a": 1}, {"b": 2}), (lambda kept: with_key(kept, "b"), lambda kept: kept.pop("a"))),
    "UserDict": (lambda: UserDict(a=1), (lambda kept: with_key(kept, "b"),)),
    "UserList": (lambda: UserList([1]), (lambda kept: kept.append(2),)),
    "array": (lambda: array("d", [1, 2]), (lambda kept: with_key(kept, 0), lambda kept: kept.append(3))),
    "bytearray": (lambda: bytearray(b"ab"), (lambda kept: kept.append(1),)),
    "memoryview": (lambda: memoryview(bytearray(b"ab")), (lambda kept: with_key(kept, 0),)),
    "number of C": (lambda: ctypes.c_double(1), (lambda kept: setattr(kept, "value", 2),)),
    "numbers of C": (lambda: (ctypes.c_int * 3)(1, 2, 3), (lambda kept: with_key(kept, 1),)),
    "shared value": (lambda: multiprocessing.Value("i", 1), (lambda kept: setattr(kept, "value", 2),)),
    "SimpleNamespace": (lambda: SimpleNamespace(a=[1]), (lambda kept: kept.a.append(2),)),
    "MappingProxyType": (lambda: [table := {"a": 1}, MappingProxyType(table)], (lambda kept: kept[0].clear(),)),
    "dataclass": (Record, (lambda kept: setattr(kept, "total", 3.0), lambda kept: kept.seen.append(1))),
    "named tuple": (lambda: Point(1, [2]), (lambda kept: kept.seen.append(3),)),
    "tuple with attributes": (
        lambda: Pair(1, [2]),
        (lambda kept: setattr(kept, "label", 5), lambda kept: kept[1].pop()),
    ),
    "structured sequence": (lambda: torch.ones(2, 2).max(0), (lambda kept: kept.values.add_(1),)),
    "dict that doubles": (lambda: Doubling(a=1), (lambda kept: with_key(kept, "b"), lambda kept: with_key(kept, "a"))),
    "list that logs": (lambda: Logging([1, [2]]), (lambda kept: kept.append(3), lambda kept: kept[1].append(4))),
    "set that refuses": (lambda: Refusing([1, 2]), (lambda kept: kept.add(3), lambda kept: kept.pop())),
    "slot of a dict": (lambda: SlottedDict(a=1), (lambda kept: setattr(kept, "hits", 1),)),
    "tensor as a key": (lambda: {torch.ones(2): 1}, (scale_key,)),
    "bit generator": (lambda: np.random.PCG64(1), (lambda kept: kept.random_raw(),)),
    "combined flags": (lambda: [Parts.HEAD | Parts.BODY], (lambda kept: with_key(kept, 0, Parts.HEAD),)),
    "keys of bytes": (lambda: {b"": 1, b"a": 2}, (lambda kept: with_key(kept, b"b"),)),
}
"""Values by name, each with changes; all are stored in checkpoints."""


def replaced_code(function: Any) -> None:
    function.__code__ = (lambda x=1: 2 * x).__code__


def unstored_function() -> Any:
    def scale(x: float = 1.0) -> float:
        return x

    return scale


WITHOUT_CHECKPOINT: dict[str, tuple[Callable[[], Any], tuple[Callable[[Any], Any], ...]]] = {
    "default factory": (lambda: defaultdict(list), (lambda kept: setattr(kept, "default_factory", dict),)),
    "code of a function": (unstored_function, (replaced_code,)),
    "defaults of a function": (unstored_function, (lambda kept: setattr(kept, "__defaults__", (2.0,)),)),
    "arguments of a partial": (lambda: partial(max, 1), (lambda kept: kept.__setstate__((max, (2,), {}, {})),)),
    "attribute of an enum": (lambda: Level.LOW, (lambda kept: setattr(kept, "label", 5),)),
    "attribute of a number": (lambda: Steps(3), (lambda kept: setattr(kept, "label", 5),)),
    "attribute of an exception": (lambda: ValueError("a"), (lambda kept: setattr(kept, "label", 5),)),
    "arguments of an exception": (lambda: ValueError("a"), (lambda kept: setattr(kept, "args", (5,)),)),
    "array of objects": (
        lambda: np.array([1, [2]], object),
        (lambda kept: with_key(kept, 0), lambda kept: kept[1].pop()),
    ),
}
"""Values that are rolled back and watched; their changes are code, or refused in checkpoints."""
OUT_OF_REACH: dict[str, Callable[[], Any]] = {
    "itertools.count": itertools.count,
    "iterator": lambda: iter([1, 2]),
    "generator": lambda: (number for number in range(3)),
    "array of records with objects": lambda: np.zeros(2, [("a", object)]),
}
"""Values whose state cannot be read; a run with an intervention refuses them by name."""
