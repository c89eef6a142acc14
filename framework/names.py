"""Parameters that take several names: one name may be given without a list."""

from collections.abc import Iterable
from typing import TypeVar

Item = TypeVar("Item")


def as_names(names: str | Iterable[Item]) -> list[str | Item]:
    """Return names as a list; a text is one name, not a sequence of letters.

    >>> as_names("norms"), as_names(["norms", "fourier"]), as_names(())
    (['norms'], ['norms', 'fourier'], [])
    """
    return [names] if isinstance(names, str) else list(names)
