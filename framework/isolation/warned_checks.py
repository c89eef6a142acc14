"""A class decorator for checks of the training state whose result does not depend on library warnings."""

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from ..errors import StateMutationError, library_warnings_ignored

Checker = TypeVar("Checker", bound=type)


def unaffected_by_warnings(*methods: str) -> Callable[[Checker], Checker]:
    """Return a class decorator for methods that read the state and raise :class:`StateMutationError` for a change.

    If a warning filter turns a library's warning into an error, the method is called again with warnings ignored.
    Ignoring them from the start would cost each call 2 µs.
    """

    def decorate(checker: Checker) -> Checker:
        for name in methods:
            setattr(checker, name, _unaffected(getattr(checker, name)))
        return checker

    return decorate


def _unaffected(method: Callable[..., None]) -> Callable[..., None]:
    @wraps(method)
    def check(*args: Any, **kwargs: Any) -> None:
        try:
            method(*args, **kwargs)
        except (Warning, StateMutationError) as error:
            if not isinstance(error, Warning) and not isinstance(error.__cause__, Warning):
                raise
            with library_warnings_ignored():
                method(*args, **kwargs)

    return check
