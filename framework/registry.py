"""Registries of classes by unique name, with discovery through the entry points of installed packages."""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from inspect import isclass
from pkgutil import iter_modules
from typing import Any, Generic, TypeVar, cast

from .errors import UsageError, source_location, unknown, warn, with_lines

Entry = TypeVar("Entry", bound=type[Any])


class NameTakenError(UsageError):
    """Two classes have the same name."""


@dataclass(eq=False, repr=False)
class Registry(Generic[Entry]):
    """Classes by their unique ``name``."""

    kind: str
    group: str
    """The group of entry points of installed packages."""
    check: Callable[[Entry], None]
    """Raises an error for a class that cannot be registered."""
    base: type[Any] | None = None
    """Errors point out unregistered subclasses of it."""
    on_demand: Mapping[str, str] = field(default_factory=dict)
    """Modules by the name of an entry that only :meth:`get` finds, and that their import registers."""
    _entries: dict[str, Entry] = field(default_factory=dict, init=False)
    _broken: dict[str, str] = field(default_factory=dict, init=False)
    _discovered: bool = field(default=False, init=False)

    def register(self, entry: Entry) -> Entry:
        """Add a class; usable as a decorator.

        In a notebook or at a prompt, a class that is defined again replaces the earlier one.

        Raises:
            UsageError: for an invalid class, or a name that another class has.
        """
        self.check(entry)
        present = self._entries.get(entry.name)
        is_redefined = present is not None and is_interactive(entry) and qualified(present) == qualified(entry)
        if present is not None and present is not entry and not is_redefined:
            raise NameTakenError(
                f"Two {self.kind}s are named {entry.name!r}: {qualified(present)} and {qualified(entry)}; "
                f"rename one of them ({where(present)}, {where(entry)})."
            )
        self._entries[entry.name] = entry
        return entry

    def register_package(self, name: str, path: Iterable[str]) -> None:
        """Import the modules of a package, whose folders are ``path``, and add the named subclasses of the base."""
        assert self.base is not None
        for module in iter_modules(path, f"{name}."):
            for entry in [*vars(import_module(module.name)).values()]:
                if isclass(entry) and issubclass(entry, self.base) and "name" in vars(entry):
                    self.register(cast(Entry, entry))

    def unregister(self, name: str) -> None:
        """Remove a class, if it is registered."""
        self._entries.pop(name, None)

    def discover(self) -> None:
        """Register the classes of installed packages in the entry-point group, without enabling any of them.

        A class that cannot be loaded is left out with a warning, and only :meth:`get` raises for it, since a broken
        package must not stop runs that do not use it.
        """
        if self._discovered:
            return
        self._discovered = True
        for point in _entry_points(*sys.path).select(group=self.group):
            try:
                self.register(point.load())
            except NameTakenError:
                self._discovered = False  # so that the next caller gets the error, too
                raise
            except (Exception, SystemExit) as error:
                reason = str(error) if isinstance(error, UsageError) else f"{with_lines(error)}."
                self._broken[point.name] = f"The {self.kind} {point.name!r} of {point.value} cannot be used. {reason}"
                warn(self._broken[point.name], stacklevel=3)

    def get(self, name: str, *, keywords: Sequence[str] = ()) -> Entry:
        """Return the class called ``name``; raises :class:`UsageError` with the nearest name or keyword."""
        self.discover()
        if name in self.on_demand:
            import_module(self.on_demand[name])
        if name in self._entries:
            return self._entries[name]
        if name in self._broken:
            raise UsageError(self._broken[name])
        unregistered = [entry for entry in _subclasses(self.base) if vars(entry).get("name") == name]
        if unregistered:  # the newest one, since a notebook may define a class several times
            newest = unregistered[-1]
            advice = f"put @{self.kind.capitalize()}Registry.register above the class {qualified(newest)}"
            raise UsageError(f"The {self.kind} {name!r} is not registered: {advice} ({where(newest)}).")
        raise unknown(self.kind, name, [*self._entries, *keywords])

    def __iter__(self) -> Iterator[Entry]:
        """Iterate over the classes, sorted by name."""
        self.discover()
        return iter([self._entries[name] for name in sorted(self._entries)])

    def names(self) -> list[str]:
        """List the names, sorted."""
        return [entry.name for entry in self]


@cache
def _entry_points(*path: str) -> Any:  # another class in Python 3.11, which also has select()
    """Return the entry points of the packages in the folders of ``path``, the module search path, which takes 30 ms."""
    return entry_points()


def _subclasses(entry: type[Any] | None) -> Iterator[type[Any]]:
    """Yield all direct and indirect subclasses of a class; ``None`` has none."""
    for subclass in () if entry is None else type.__subclasses__(entry):
        yield subclass
        yield from _subclasses(subclass)


def is_interactive(entry: type) -> bool:
    """Return whether a class was defined in a notebook or at a prompt, where a second definition is not a mistake."""
    return entry.__module__ == "__main__" and "__file__" not in vars(sys.modules["__main__"])


def qualified(entry: type) -> str:
    """Return the module and the qualified name of a class."""
    return f"{entry.__module__}.{entry.__qualname__}"


def where(thing: Any) -> str:
    """Return the file and line of a class or function, such as ``mine.py:16``, or its module if they are unknown."""
    thing = getattr(thing, "__func__", thing)
    module = getattr(thing, "__module__", type(thing).__module__)
    return source_location(thing).partition(" in ")[0] or f"module {module}"
