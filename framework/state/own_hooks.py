"""The mark of what loopscope itself registers on parameters and modules."""

from collections.abc import Callable
from typing import Any


class OwnHook:
    """Marks what loopscope registers on parameters and modules, which changes nothing that was not declared.

    What others register there belongs to the training state, since the run may depend on it. What bears this mark does
    not: a run with it and a run without it have the same digests.
    """


class OwnFunction(OwnHook):
    """A function that loopscope registers as a hook of a parameter or module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *arguments: Any) -> Any:
        """Call the function."""
        return self._function(*arguments)
