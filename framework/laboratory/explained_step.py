"""The explanation of a step, as rewinds write it to a file and reports read it."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, get_type_hints

from ..durable_files import plain_json
from .changes import BRANCH_TITLES

QUANTITIES = {
    "effect": "the effect on the next loss",
    "lr": "the learning rate",
    "loss": "the loss",
    "copies": "the number of copies of one row in the batch",
}
"""Descriptions of the quantities that have no names."""


@dataclass(frozen=True)
class Deviation:
    """A quantity that is unusual at a step, with its significance."""

    step: int
    quantity: str
    """``lr``, ``copies`` of a row, ``loss``, ``effect`` (on the next loss), or by name ``output``, ``gradient``,
    ``state``, ``update``."""
    name: str
    """The name of the parameter or, for outputs, of the layer (``logits`` for the model); empty for the loss."""
    value: float
    usual: float
    """The median of the earlier steps."""
    p: float
    """The p-value of the step's rank, times the number of tested steps."""
    comparisons: int
    others: Sequence[str]
    """Other unusual quantities of that step."""

    def __str__(self) -> str:
        quantity = QUANTITIES.get(self.quantity, f"{self.quantity} of {self.name}")
        return (
            f"step {self.step:,}: {quantity} was {self.value:.4g}, its earlier median {self.usual:.4g} "
            f"(p = {self.p:.2g} of {self.comparisons:,} quantities)"
        )


@dataclass(frozen=True)
class ExplainedRow:
    """A row of the batch of the step in question."""

    index: int | None
    """The row's index in the data set, if known."""
    place: int
    """The row's position in the batch."""
    loss: float
    gradient_norm: float
    stands_out: bool = False
    description: Any = None

    @property
    def name(self) -> str:
        """The row's name in sentences."""
        return f"row {self.index:,}" if self.index is not None else f"the row at place {self.place}"


@dataclass(frozen=True)
class Branch:
    """A variant of the step; medians if it was run several times."""

    name: str
    times: int
    loss: float | None
    effect: float
    later: float | None
    removed: float | None = None
    """The removed share of the harm."""

    @property
    def title(self) -> str:
        """What the branch does."""
        return BRANCH_TITLES.get(self.name, self.name)

    @property
    def removed_text(self) -> str:
        """The removed share as text; empty if the branch does far more harm itself."""
        return "" if self.removed is None or not self.removed >= -9 else f"{self.removed:.0%}"


@dataclass(frozen=True)
class Explanation:
    """The explanation of a step: departure, cause and verdict."""

    step: int
    """The step in question."""
    cause: str | None
    """data, step size, optimizer state, precision, fault or chance; ``None`` if inconclusive."""
    verdict: str
    where: Deviation | None = None
    rows: Sequence[ExplainedRow] = ()
    branches: Sequence[Branch] = ()
    left_out: Sequence[str] = ()
    """The committing hooks, which are disabled in the branches."""
    folder: Path | None = field(default=None, compare=False)

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> "Explanation":
        """Return the explanation of a file's content, whose fields were checked."""
        values = {name: content[name] for name in FIELDS}
        values["where"] = content["where"] and Deviation(**_fields(Deviation, content["where"]))
        values["rows"] = [ExplainedRow(**_fields(ExplainedRow, row)) for row in content["rows"]]
        values["branches"] = [Branch(**_fields(Branch, branch)) for branch in content["branches"]]
        return cls(**values)

    def as_dict(self) -> dict[str, Any]:
        """Return everything but the folder as plain values."""
        return dict(plain_json({name: value for name, value in asdict(self).items() if name != "folder"}))

    @property
    def outlier_rows(self) -> list[ExplainedRow]:
        """The distinct rows that stand out, largest loss first."""
        return by_loss({row.name: row for row in self.rows if row.stands_out}.values())


FIELDS = {name: of for name, of in get_type_hints(Explanation).items() if name != "folder"}
"""The types of the fields of the file."""


def by_loss(rows: Iterable[ExplainedRow]) -> list[ExplainedRow]:
    """Return rows in the order of their losses, the largest first; NaN counts as ∞."""
    return sorted(rows, key=lambda row: -math.inf if math.isnan(row.loss) else -row.loss)


def _fields(kind: type, content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a class, without those that a later version wrote."""
    return {name: content.get(name) for name in get_type_hints(kind)}
