"""Rows of the tables: a figure, its measurement, and the bar as an upper or a lower limit."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from loopscope.experiments.mod_arithmetic.runner import QUICK

from tests.benchmarks.timing import Spread


class Shown(Protocol):
    """Base class of the rows of a table."""

    columns: ClassVar[Sequence[str]]
    to_the_right: ClassVar[range]

    @property
    def figure(self) -> str: ...

    @property
    def result(self) -> str: ...

    @property
    def numbers(self) -> Iterable[float]: ...

    def cells(self) -> list[str]: ...


@dataclass(frozen=True)
class Unit:
    """Unit and format of a number."""

    symbol: str
    factor: float
    digits: int

    def text(self, value: float) -> str:
        """Format a value."""
        shown = round(value * self.factor, self.digits) + 0.0  # turns -0.0 into 0.0
        return f"{shown:,.{self.digits}f} {self.symbol}"


MICROSECONDS = Unit("µs", 1e6, 1)
MILLISECONDS = Unit("ms", 1e3, 2)
SECONDS = Unit("s", 1, 2)
PERCENT = Unit("%", 100, 2)
TIMES = Unit("×", 1, 2)
BYTES = Unit("B", 1, 0)
COPIES = Unit("copies", 1, 2)
PER_SECOND = Unit("/s", 1, 0)


@dataclass(frozen=True)
class Row:
    """One figure with a ``bar`` (at most) or ``floor`` (at least); without either it is for comparison only."""

    columns: ClassVar[Sequence[str]] = ["Figure", "Against", "Measured", "Best", "Noise", "Bar", "Result"]
    to_the_right: ClassVar[range] = range(2, 6)
    """The columns of numbers."""

    figure: str
    against: str
    unit: Unit
    value: Spread
    bar: float | None = None
    floor: float | None = None

    @property
    def numbers(self) -> Iterable[float]:
        """All measured numbers."""
        return vars(self.value).values()

    @property
    def result(self) -> str:
        """Return ``pass``, ``miss``, or an empty string without a bar."""
        if self.bar is None and self.floor is None:
            return ""
        over = self.bar is not None and self.value.median > self.bar
        under = self.floor is not None and self.value.median < self.floor
        return "miss" if over or under else "pass"

    def cells(self) -> list[str]:
        """Return the texts of the table's columns."""
        text = self.unit.text
        numbers = [text(self.value.median), text(self.value.best), text(self.value.noise)]
        bounds = ["≤ " + text(self.bar)] if self.bar is not None else []
        bounds += ["≥ " + text(self.floor)] if self.floor is not None else []
        return [self.figure, self.against, *numbers, ", ".join(bounds), self.result]


PAPER = {"train_size": 320, "test_size": 320, "batch_size": 32}
"""Options of the paper preset's model on little data: the costs depend on the model, not on the batch."""


@dataclass(frozen=True)
class Effort:
    """The effort of the measurements; a smaller ``share`` gives a quick look, and smaller models suit tests."""

    share: float = 1.0
    quick: dict[str, Any] = field(default_factory=lambda: QUICK | {"train_size": 90 * 32})
    """Options of the quick preset, cut to full batches: 90 steps an epoch."""
    paper: dict[str, Any] = field(default_factory=lambda: dict(PAPER))

    def times(self, count: int) -> int:
        """Return the number of repetitions for ``count`` repetitions at full effort; at least one."""
        return max(1, round(count * self.share))
