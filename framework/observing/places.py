"""Functions of torch that are replaced by wrappers while something observes them."""

from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple

from ..state import uncompiled


class Place(NamedTuple):
    """A function of torch, and the wrapper that replaces it."""

    owner: Any
    name: str
    function: Callable[..., Any]
    wrapper: Callable[..., Any]

    def install(self) -> "Place":
        """Replace the function, unless a replacement by others, made meanwhile, calls the wrapper; return itself."""
        if getattr(self.owner, self.name) is self.function:
            setattr(self.owner, self.name, self.wrapper)
        return self

    def remove(self) -> None:
        """Restore the function, unless others have replaced it meanwhile: then the wrapper remains, without effect."""
        if getattr(self.owner, self.name) is self.wrapper:
            setattr(self.owner, self.name, self.function)


def place(owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Place:
    """Return the place of a function, whose wrapper ``make`` returns; compiled code does not look into it."""
    function = getattr(owner, name)
    return Place(owner, name, function, uncompiled(wraps(function)(make(function))))
