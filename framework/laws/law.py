"""Laws that every training obeys: what a law declares, what it returns, and the registry of laws."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal

from ..errors import UsageError
from ..registry import Registry

if TYPE_CHECKING:
    from .trial import Trial


LawVerdict = Literal["holds", "broken", "not checked"]
"""The result of a law at a step."""


@dataclass(frozen=True)
class Outcome:
    """A verdict with its evidence."""

    verdict: LawVerdict
    evidence: str = ""
    """One sentence with numbers, or why the law was not checked."""
    subjects: frozenset[str] = field(default_factory=frozenset)
    """What breaks the law, such as parameters; of a persistent law, only what breaks it at every step counts."""


def holds(evidence: str = "") -> Outcome:
    """Return that the law holds, perhaps with a declared exception."""
    return Outcome("holds", evidence)


def broken(evidence: str, subjects: Iterable[str] = ()) -> Outcome:
    """Return that the law is broken, with a counterexample."""
    return Outcome("broken", evidence, frozenset(subjects))


def not_checked(reason: str) -> Outcome:
    """Return that the law does not apply, or cannot be decided."""
    return Outcome("not checked", reason)


class Law(ABC):
    """A property of every training. A subclass is created once for a check, and tried at each of its steps.

    A law changes what it likes in :meth:`.Trial.branch`, which rolls it back.
    """

    name: ClassVar[str]
    statement: ClassVar[str]
    """The law in a few words."""
    remedy: ClassVar[str]
    """What to do if it is broken: one sentence."""
    is_persistent: ClassVar[bool] = False
    """Whether the law is broken only if it is broken at every step that was tried."""

    @abstractmethod
    def check(self, trial: "Trial") -> Outcome:
        """Try the law at one step of the training."""


def _check_law(law: type[Law]) -> None:
    missing = [item for item in ("name", "statement", "remedy") if not isinstance(getattr(law, item, None), str)]
    if missing:
        raise UsageError(f"The law {law.__name__} has no {' and no '.join(missing)}; set them as strings in the class.")


LawRegistry: Registry[type[Law]] = Registry("law", "loopscope.laws", _check_law, Law)
