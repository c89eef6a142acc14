"""Values that a LightningModule stores on itself in a validation, such as its best score: kept after the validation."""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any

from torch import nn

from ..state import InternalFunction
from ..state.values import ATOMS

CONTAINERS = (list, dict, set, deque)
STANDARD = frozenset(vars(nn.Module()))


class ValidationRecords:
    """Keeps the numbers, texts and containers that validations store, while everything else of modules is restored.

    Values that ``forward`` or a training step changes as well are no records: the training depends on them.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._of_training: set[str] = set()
        self._latest = self._read()
        self._changed: dict[str, tuple[Any, Any]] = {}

    def _read(self) -> dict[str, tuple[Any, Any]]:
        """Return the values by the name of their attributes, each with a copy of its contents."""
        attributes = vars(self._module).items()
        return {
            name: (value, copy(value) if type(value) in CONTAINERS else value)
            for name, value in attributes
            if name not in STANDARD and type(value) in (*ATOMS, *CONTAINERS)
        }

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Note the records that the body, a validation, stores."""
        start = self._read()
        self._of_training |= _differing(self._latest, start)
        before_forward = [start]

        def enter(*_: Any) -> None:
            before_forward.append(self._read())

        def leave(*_: Any) -> None:
            self._of_training.update(_differing(before_forward.pop(), self._read()))

        handles = [
            self._module.register_forward_pre_hook(InternalFunction(enter)),
            self._module.register_forward_hook(InternalFunction(leave)),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            end = self._read()
            names = _differing(start, end) & end.keys() - self._of_training
            self._changed = {name: end[name] for name in names}

    def keep(self) -> None:
        """Store the records again, after the module was restored."""
        for name, (value, contents) in self._changed.items():
            vars(self._module)[name] = value
            if isinstance(value, CONTAINERS):
                value.clear()
            if isinstance(value, (list, deque)):
                value.extend(contents)
            elif isinstance(value, (dict, set)):
                value.update(contents)
        self._latest = self._read()


def _differing(one: dict[str, tuple[Any, Any]], other: dict[str, tuple[Any, Any]]) -> set[str]:
    names = one.keys() ^ other.keys()
    return names | {name for name in one.keys() & other.keys() if not _is_same(one[name][1], other[name][1])}


def _is_same(one: Any, other: Any) -> bool:
    if type(one) is not type(other) or not isinstance(one, CONTAINERS):
        return type(one) is type(other) and bool(one == other or one is other)
    items = [[*value.items()] if isinstance(value, dict) else [*value] for value in (one, other)]
    flat = [[part for item in side for part in (item if isinstance(one, dict) else (item,))] for side in items]
    return len(flat[0]) == len(flat[1]) and all(first is second for first, second in zip(*flat, strict=True))
