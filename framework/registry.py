"""Registries: classes by their unique name, found in installed packages through their entry points."""

import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import entry_points
from threading import current_thread, main_thread
from types import FrameType
from typing import Any, Generic, TypeVar

from .errors import UsageError, source_location, unknown, with_lines

Entry = TypeVar("Entry", bound=type[Any])


class NameTakenError(UsageError):
    """Two classes claim one name, so nobody can tell which one is meant."""


class Registry(Generic[Entry]):
    """Classes by their unique ``name``."""

    def __init__(
        self, kind: str, entry_point_group: str, check: Callable[[Entry], None], base: type[Any] | None = None
    ) -> None:
        self._kind = kind
        self._group = entry_point_group
        self._check = check
        self.base = base  # one of its subclasses that is not registered is found by its name, too
        self._entries: dict[str, Entry] = {}
        self._broken: dict[str, str] = {}
        self._discovered = False

    def register(self, entry: Entry) -> Entry:
        """Add a class (a decorator); raises :class:`UsageError` for a malformed class or a taken name.

        In a notebook, or at a prompt, a class takes the place of the one that was defined there under its full name.
        """
        self._check(entry)
        present = self._entries.get(entry.name)
        again = present is not None and is_interactive(entry) and qualified(present) == qualified(entry)
        if present is not None and present is not entry and not again:
            raise NameTakenError(
                f"Two {self._kind}s are named {entry.name!r}: {qualified(present)} and {qualified(entry)}; "
                f"rename one of them ({where(present)}, {where(entry)})."
            )
        self._entries[entry.name] = entry
        return entry

    def unregister(self, name: str) -> None:
        """Forget a class again."""
        self._entries.pop(name, None)

    def discover(self) -> None:
        """Register what installed packages offer under the entry-point group; nothing is switched on by that.

        What cannot be loaded is left out with a warning, and refused by :meth:`get`: one broken package must not
        stop the runs that do without it.
        """
        if self._discovered:
            return
        self._discovered = True
        for point in entry_points(group=self._group):
            try:
                with _presses_told_apart():
                    entry = point.load()
                self.register(entry)
            except NameTakenError:
                self._discovered = False  # so that whoever asks next is told as well
                raise
            except (Exception, SystemExit, KeyboardInterrupt) as error:
                if isinstance(error, _PressedError):
                    raise
                reason = str(error) if isinstance(error, UsageError) else f"{with_lines(error)}."
                self._broken[point.name] = f"The {self._kind} {point.name!r} of {point.value} cannot be used. {reason}"
                warnings.warn(self._broken[point.name], stacklevel=3)

    def get(self, name: str, *, keywords: Sequence[str] = ()) -> Entry:
        """Return the class called ``name``; raises :class:`UsageError` with the nearest name or keyword."""
        self.discover()
        if name in self._entries:
            return self._entries[name]
        if name in self._broken:
            raise UsageError(self._broken[name])
        forgotten = [entry for entry in _descendants(self.base) if vars(entry).get("name") == name]
        if forgotten:  # the newest, since a notebook makes a class again and again
            above = f"@{self._kind.capitalize()}Registry.register above the class {qualified(forgotten[-1])}"
            raise UsageError(f"The {self._kind} {name!r} is not registered: put {above} ({where(forgotten[-1])}).")
        raise unknown(self._kind, name, [*self._entries, *keywords])

    def __iter__(self) -> Iterator[Entry]:
        """Iterate over the classes, by name."""
        self.discover()
        return iter([self._entries[name] for name in sorted(self._entries)])

    def names(self) -> list[str]:
        """List the names, sorted."""
        return [entry.name for entry in self]


class _PressedError(KeyboardInterrupt):
    """Somebody pressed Ctrl-C; a plain KeyboardInterrupt is what a plug-in raised itself."""


@contextmanager
def _presses_told_apart() -> Iterator[None]:
    def pressed(number: int, frame: FrameType | None) -> None:
        raise _PressedError

    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler or current_thread() is not main_thread():
        yield
        return
    signal.signal(signal.SIGINT, pressed)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _descendants(entry: type[Any] | None) -> Iterator[type[Any]]:
    for each in () if entry is None else type.__subclasses__(entry):
        yield each
        yield from _descendants(each)


def is_interactive(entry: type) -> bool:
    """Return whether a class was defined in a notebook or at a prompt, where running a line again is no mistake."""
    return entry.__module__ == "__main__" and "__file__" not in vars(sys.modules["__main__"])


def qualified(entry: type) -> str:
    """Return a class's full name."""
    return f"{entry.__module__}.{entry.__qualname__}"


def where(thing: Any) -> str:
    """Return file and line of a class or function, such as ``mine.py:16``; else its module."""
    thing = getattr(thing, "__func__", thing)
    return (
        source_location(thing).partition(" in ")[0] or f"module {getattr(thing, '__module__', type(thing).__module__)}"
    )
