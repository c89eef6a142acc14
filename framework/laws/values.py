"""Tensors within arguments and results: found in one order, and replaced in new containers of the same kinds."""

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

from torch import Tensor
from torch.nn import Module


@dataclass(frozen=True)
class Container:
    """A container, with other entries in place of the original ones."""

    original: Any
    entries: Any
    """A dict of the entries by key or field, or a list of them."""

    def assembled(self, function: Callable[[Any], Any]) -> Any:
        """Return a container of the same kind whose entries are results of ``function``."""
        kind = type(self.original)
        if isinstance(self.entries, dict):
            named = {key: assembled(item, function) for key, item in self.entries.items()}
            if has_tensors(self.original):
                made = copy(self.original)
                vars(made).update(named)
                return made
            if not isinstance(self.original, dict):
                return replace(self.original, **named)
            return named if kind is dict else kind(named)
        listed = [assembled(item, function) for item in self.entries]
        if hasattr(self.original, "_fields"):  # a named tuple
            return kind(*listed)
        return listed if kind is list else kind(listed)


def dismantled(value: Any, function: Callable[[Any], Any]) -> Any:
    """Return nested containers as :class:`Container` objects, whose innermost entries are results of ``function``."""
    if isinstance(value, dict):
        return Container(value, {key: dismantled(item, function) for key, item in value.items()})
    if isinstance(value, (list, tuple)):
        return Container(value, [dismantled(item, function) for item in value])
    if _is_object(value) and tensors_within(value):
        names = [entry.name for entry in fields(value) if entry.init]
        return Container(value, {name: dismantled(getattr(value, name), function) for name in names})
    if has_tensors(value):
        named = {name: function(item) for name, item in vars(value).items() if isinstance(item, Tensor)}
        return Container(value, named)
    return function(value)


def assembled(value: Any, function: Callable[[Any], Any]) -> Any:
    """Return the value that :func:`dismantled` took apart, with results of ``function`` as its innermost entries."""
    return value.assembled(function) if isinstance(value, Container) else function(value)


def leaves_by_name(value: Any, name: str = "") -> list[tuple[str, Any]]:
    """Return the innermost entries of dismantled containers, each with the innermost key or field around it."""
    if not isinstance(value, Container):
        return [(name, value)]
    if isinstance(value.entries, dict):
        return [leaf for key, item in value.entries.items() for leaf in leaves_by_name(item, str(key))]
    return [leaf for item in value.entries for leaf in leaves_by_name(item, name)]


def tensors_within(value: Any) -> list[Tensor]:
    """Return the tensors in nested containers, named tuples and data classes, in the order of their entries."""
    found: list[Tensor] = []
    _collect(value, found)
    return found


def _collect(value: Any, found: list[Tensor]) -> None:
    if isinstance(value, Tensor):
        found.append(value)
    elif isinstance(value, Mapping):
        for item in value.values():
            _collect(item, found)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _collect(item, found)
    elif _is_object(value):
        for entry in fields(value):
            _collect(getattr(value, entry.name, None), found)
    elif has_tensors(value):
        found += [item for item in vars(value).values() if isinstance(item, Tensor)]


def has_tensors(value: Any) -> bool:
    """Return whether a value is a plain object with tensors as attributes, such as a batch or a distribution."""
    if isinstance(value, (Tensor, Module, type, dict, list, tuple)) or _is_object(value):
        return False
    return any(isinstance(item, Tensor) for item in getattr(value, "__dict__", {}).values())


def has_parameters(module: Module) -> bool:
    """Return whether a module or a part of it has parameters."""
    return next(module.parameters(), None) is not None


def _is_object(value: Any) -> bool:
    return is_dataclass(value) and not isinstance(value, type)


def weight_of(name: str) -> str:
    """Return the name of the weight of a bias, or an empty text."""
    return f"{name.removesuffix('bias')}weight" if name.endswith("bias") else ""
