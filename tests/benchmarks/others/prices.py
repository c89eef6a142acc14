"""Results for one framework: its costs and the effects of callbacks; a row of the first table."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from tests.benchmarks.rows import MICROSECONDS
from tests.benchmarks.timing import Spread

KINDS = ("nothing", "all events", "three values")


@dataclass(frozen=True)
class Side:
    """A framework's row; ``why_not`` is the reason if it could not be measured."""

    columns: ClassVar[Sequence[str]] = [
        "Framework", "Own time per step", "with a callback of all events", "with three callbacks and values",
        "Values go to", "A callback that draws a random number", "A callback that writes to weights",
    ]  # fmt: skip
    to_the_right: ClassVar[range] = range(1, 4)
    result: ClassVar[str] = ""

    figure: str
    prices: Mapping[str, Spread] = field(default_factory=dict)
    logs: str = "–"
    draws: str = "–"
    writes: str = "–"
    why_not: str = ""

    @property
    def numbers(self) -> Iterator[float]:
        """All numbers of the row."""
        for spread in self.prices.values():
            yield from vars(spread).values()

    def cells(self) -> list[str]:
        """Return the texts of the table's columns."""
        name = f"{self.figure} ({self.why_not})" if self.why_not else self.figure
        prices = [_price(self.prices.get(kind)) for kind in KINDS]
        return [name, *prices, self.logs, self.draws, self.writes]


def _price(spread: Spread | None) -> str:
    if spread is None:
        return "–"
    return f"{MICROSECONDS.text(spread.median)} ± {MICROSECONDS.text(spread.noise / 2).removesuffix(' µs')}"
