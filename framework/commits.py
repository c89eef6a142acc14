"""Declared changes: recorded while a hook runs, applied after it was rolled back."""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from framework.errors import LoopscopeError


class StatePart(Enum):
    """A part of the training state that an intervention may declare to change."""

    GRADIENTS = "gradients"
    PARAMETERS = "parameters"


class UndeclaredCommitError(LoopscopeError):
    """A hook asked to keep a change that its class does not declare."""


@dataclass
class CommitRecord:
    """The changes that one call of one hook asked to keep, in order; nothing is changed before ``apply``."""

    hook: str
    declared: frozenset[StatePart]
    changes: list[Callable[[], None]] = field(default_factory=list)

    def record(self, part: StatePart, verb: str, change: Callable[[], None]) -> None:
        """Queue ``change``; raises :class:`UndeclaredCommitError` unless the hook declares ``part``."""
        if part not in self.declared:
            raise UndeclaredCommitError(
                f"{verb} changes the {part.value}, which hook {self.hook!r} does not declare; "
                f"add commits = {{StatePart.{part.name}}} to its class."
            )
        self.changes.append(change)

    def apply(self) -> None:
        """Make the recorded changes, in the order in which they were asked for."""
        for change in self.changes:
            change()
