"""The file format of explanations of steps, and their texts and HTML."""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict, cast, get_type_hints

from ..durable_files import read_json
from ..errors import UsageError
from ..laboratory import BRANCH_TITLES
from ..runs import checked_fields
from .tables import cells, table, text

MOST_LINES, LONGEST_SENTENCE = 20, 2000
BRANCH, ROW = ("", "times", "loss", "next losses", "later", "removed"), ("row", "loss", "gradient norm", "what it is")


class Where(TypedDict):
    """The first departure from the history."""

    step: int
    quantity: str
    name: str
    value: float
    usual: float
    p: float
    comparisons: int
    others: Sequence[str]


class Row(TypedDict):
    """A row of the batch."""

    index: int | None
    place: int
    loss: float
    gradient_norm: float
    stands_out: bool
    description: Any


class BranchRow(TypedDict):
    """A repetition of the step under changed conditions."""

    name: str
    times: int
    loss: float | None
    effect: float
    later: float | None
    removed: float | None


class Explained(TypedDict):
    """The content of the file."""

    step: int
    cause: str | None
    verdict: str
    where: Where | None
    rows: Sequence[Row]
    branches: Sequence[BranchRow]
    left_out: Sequence[str]


def read_explained(path: Path) -> str:
    """Read an explanation, and return it as HTML; raises :class:`UsageError` for an invalid file."""
    explained = cast(Explained, checked_fields(read_json(path), get_type_hints(Explained), path))
    try:
        return _html_of(explained)
    except OverflowError as error:
        raise UsageError(f"{path} cannot be used: it has a number too large for a loss or a step.") from error


def departure_text(where: Mapping[str, Any]) -> str:
    """Describe the first departure, with its p value."""
    quantity = {
        "effect": "the effect on the next loss",
        "lr": "the learning rate",
        "loss": "the loss",
        "copies": "the number of copies of one row in the batch",
    }.get(where["quantity"], f"{where['quantity']} of {where['name']}")
    return (
        f"step {where['step']:,}: {quantity} was {where['value']:.4g}, its earlier median {where['usual']:.4g} "
        f"(p = {where['p']:.2g} of {where['comparisons']:,} quantities)"
    )


def removed_text(removed: float | None) -> str:
    """Return the share of the harm that a branch removes; empty if the branch does far more harm itself."""
    return "" if removed is None or not removed >= -9 else f"{removed:.0%}"


def _html_of(explained: Explained) -> str:
    """Return the verdict, the departure, the branches, and the outlier rows."""
    where = explained["where"]
    lines = {
        "Where": departure_text(where) if where else "",
        "Also": ", ".join(where["others"]) if where else "",
        "Not in the branches": ", ".join(explained["left_out"]),
    }
    paragraphs = "".join(_paragraph(f"{name}: {line}.") for name, line in lines.items() if line)
    box = _paragraph(f"Cause: {explained['cause'] or 'unknown'}") + _paragraph(explained["verdict"])
    tables = {"Branches": (BRANCH, [*_branches(explained)]), "Outlier rows": (ROW, _rows(explained))}
    drawn = [table(title, head, rows, level=4, most=MOST_LINES) for title, (head, rows) in tables.items() if rows]
    heading = f"<h3>Step {text(explained['step'])}, explained</h3>"
    return f'<article>{heading}<div class="verdict">{box}</div>{paragraphs}{"".join(drawn)}</article>'


def _branches(explained: Explained) -> Iterator[list[object]]:
    for branch in explained["branches"]:
        numbers = cells(branch, ("times", "loss", "effect", "later"))
        yield [BRANCH_TITLES.get(branch["name"], branch["name"]), *numbers, removed_text(branch.get("removed"))]


def _rows(explained: Explained) -> list[list[object]]:
    """Return the outlier rows, each once, largest loss first."""
    rows = {}
    for row in explained["rows"]:
        index = row.get("index")
        if row["stands_out"]:
            description = " ".join(str(row.get("description") or "").split())
            name = f"place {row['place']}" if index is None else index
            rows[name] = (row["loss"], [name, *cells(row, ("loss", "gradient_norm")), description])
    by_loss = sorted(rows.values(), key=lambda row: math.inf if math.isnan(row[0]) else row[0], reverse=True)
    return [row for _, row in by_loss]


def _paragraph(line: str) -> str:
    return f"<p>{text(line, LONGEST_SENTENCE)}</p>"
