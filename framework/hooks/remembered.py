"""What an object remembers, declared an attribute at a time: saved by checkpoints, and as new after a reset."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Generic, Self, TypeVar, overload

from torch.utils._pytree import tree_map

from ..errors import UsageError

Value = TypeVar("Value")


class Remembered(Generic[Value]):
    """An attribute that belongs to the memory of a :class:`Remembering` object.

    It begins as what ``fresh()`` returns, made at its first use, and so it begins again after a reset. In the saved
    state it stands under its name without leading underscores.

    Args:
        fresh: makes the value: a tensor, a plain value, lists or dicts of them, or a :class:`Remembering` object.
        by_options: ``fresh`` takes the owner, on whose options the value depends.
        saved: ``False`` leaves it out of the saved state; for what is used up within a step.
        merged: the value is a :class:`Remembering` object, and its entries stand beside the owner's own.
    """

    def __init__(
        self, fresh: Callable[..., Value], *, by_options: bool = False, saved: bool = True, merged: bool = False
    ) -> None:
        self._fresh = fresh
        self._by_options = by_options
        self.saved = saved
        self.merged = merged

    def __set_name__(self, owner: type, name: str) -> None:
        """Learn the name of the attribute, and with it the key."""
        self.name, self.key = name, name.lstrip("_")

    @overload
    def __get__(self, owner: None, kind: type) -> Self: ...
    @overload
    def __get__(self, owner: object, kind: type) -> Value: ...
    def __get__(self, owner: object | None, kind: type) -> Self | Value:
        """Return a fresh value and give it to the owner, where Python finds it from then on."""
        if owner is None:
            return self
        value = vars(owner)[self.name] = self.make(owner)
        return value

    def make(self, owner: object) -> Value:
        """Return a fresh value; the owner keeps the one it has."""
        return self._fresh(owner) if self._by_options else self._fresh()


class Remembering:
    """An object with a memory: the attributes that its class declares as :class:`Remembered`.

    >>> class Extremes(Remembering):
    ...     largest = Remembered(float)
    ...     _names = Remembered(list[str])
    >>> extremes = Extremes()
    >>> extremes._names.append("loss")
    >>> extremes.state_dict()
    {'largest': 0.0, 'names': ['loss']}
    >>> extremes.reset()
    >>> extremes._names
    []
    """

    _remembered: ClassVar[tuple[Remembered[Any], ...]] = ()

    def __init_subclass__(cls, **options: Any) -> None:
        """Collect what the class and its bases declare."""
        super().__init_subclass__(**options)
        declared = {name: value for each in reversed(cls.__mro__) for name, value in vars(each).items()}
        cls._remembered = tuple(value for value in declared.values() if isinstance(value, Remembered))
        keys = [entry.key for entry in cls._remembered]
        if twice := [key for key in keys if keys.count(key) > 1]:
            raise UsageError(f"{cls.__name__} remembers two attributes as {twice[0]!r}; rename one of them.")

    def state_dict(self) -> dict[str, Any]:
        """Return what this object remembers: tensors and plain values, readable without executing code."""
        state: dict[str, Any] = {}
        for entry in self._saved():
            value = getattr(self, entry.name)
            kept = value.state_dict() if isinstance(value, Remembering) else _copied(value)
            state |= kept if entry.merged else {entry.key: kept}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from what :meth:`state_dict` returned; raises :class:`UsageError` if a part of it is missing."""
        for entry in self._saved():
            if not entry.merged and entry.key not in state:
                raise UsageError(f"its state has no {entry.key!r}, so it is that of another version")
            kept = state if entry.merged else state[entry.key]
            value = entry.make(self)
            if isinstance(value, Remembering):
                value.load_state_dict(kept)
            else:
                value = _copied(kept)
            setattr(self, entry.name, value)

    def reset(self) -> None:
        """Forget everything measured so far; called between strategies."""
        for entry in self._remembered:
            vars(self).pop(entry.name, None)

    def _saved(self) -> list[Remembered[Any]]:
        return [entry for entry in self._remembered if entry.saved]


def _copied(value: Any) -> Any:
    """Copy lists and dicts, so that none is shared by the memory and a state; tensors are."""
    return tree_map(lambda leaf: leaf, value)
