"""The contents of containers, read and written by the methods of the built-in types, which subclasses may override.

``Counter.update`` counts, a ``ModelOutput`` of transformers forbids ``update``, and a list of user code may log in
``extend``: only the methods of dict, list, set and deque copy the contents and nothing else.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import cache, partial
from typing import Any

import numpy as np

MUTABLE_CONTAINERS = (dict, list, set, deque)
CONTAINERS = (*MUTABLE_CONTAINERS, tuple, frozenset)
# OrderedDict first, since the methods of dict ignore its order.
_BUILT_IN: tuple[Any, ...] = (OrderedDict, *CONTAINERS)


@cache
def _built_in_of(kind: Any) -> Any:
    """Return the built-in type of a container, whose methods read and write it."""
    return next((base for base in _BUILT_IN if issubclass(kind, base)), None)


def _built_in(container: Any) -> Any:
    kind: Any = type(container)
    return _built_in_of(kind)


@cache
def _overrides_reading(kind: Any) -> bool:
    """Return whether iteration, length or truth of a class differ from those of its built-in type."""
    base = _built_in_of(kind)
    if base is None:
        return False
    return kind.__iter__ is not base.__iter__ or kind.__len__ is not base.__len__ or hasattr(kind, "__bool__")


class _View:
    """The items of a container whose class overrides how they are read, or the elements of an array of objects."""

    def __init__(self, length: Callable[[], int], items: Callable[[], Iterable[Any]]) -> None:
        self._length, self._items = length, items

    def __len__(self) -> int:
        return self._length()

    def __iter__(self) -> Iterator[Any]:
        return iter(self._items())


STORED_DICTS: tuple[type, ...] = (dict, OrderedDict, Counter)
"""The classes of dicts that checkpoints store as they are, without their attributes."""


def dict_like(original: dict[Any, Any], values: Iterable[Any]) -> dict[Any, Any]:
    """Return a dict of the class and with the keys of ``original``, one of :data:`STORED_DICTS`, and other values."""
    made = type(original)()
    refill(made, original, values)
    return made


def keys_of(table: dict[Any, Any]) -> Collection[Any]:
    """Return a view of a dict's keys in the dict's order."""
    keys: Collection[Any] = _built_in(table).keys(table)
    return keys


def values_of(container: Any) -> Any:
    """Return a view of a dict's values, of the items of another container, or of an array's elements."""
    if type(container) is dict:
        return container.values()
    if isinstance(container, dict):
        return _built_in(container).values(container)
    if isinstance(container, np.ndarray):
        return _View(partial(getattr, container, "size"), partial(getattr, container, "flat"))
    kind: Any = type(container)
    if not _overrides_reading(kind):
        return container
    base = _built_in_of(kind)
    return _View(partial(base.__len__, container), partial(base.__iter__, container))


def refill(container: Any, keys: Iterable[Any], values: Iterable[Any]) -> None:
    """Replace the contents of a dict by keys and values, of another mutable container by values."""
    base = _built_in(container)
    if isinstance(container, np.ndarray):
        for index, value in zip(np.ndindex(container.shape), values, strict=True):
            container[index] = value
        return
    if base is None:  # slots
        container.extend(values)
        return
    base.clear(container)
    if isinstance(container, dict):
        for key, value in zip(keys, values, strict=True):
            base.__setitem__(container, key, value)
    elif isinstance(container, set):
        base.update(container, values)
    else:
        base.extend(container, values)
