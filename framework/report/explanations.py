"""The explanation of a step as its file has it, and the words in which it is told, wherever that is."""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict, cast, get_type_hints

from ..durable_files import read_json
from ..errors import UsageError
from ..runs import checked_fields
from .tables import cells, table, text

MOST_LINES, LONGEST_SENTENCE = 20, 2000
BRANCH, ROW = ("", "times", "loss", "next losses", "later", "removed"), ("row", "loss", "gradient norm", "what it is")
BRANCHES = {  # the ways of taking a step, in words
    "run": "the run's own step",
    "as_it_was": "the same step again",
    "fresh": "on fresh batches",
    "without_rows": "without the rows that stand out",
    "clipped": "gradients clipped at their usual norm",
    "half_rate": "half the learning rate",
    "usual_rate": "the usual learning rate",
    "fresh_state": "an optimizer that remembers nothing",
    "float32": "everything in float32",
    "float64": "everything in float64",
    "layer_in_float32": "that layer in float32",
    "element_restored": "the element that changed put back",
}


class Where(TypedDict):
    """What left its history first."""

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


class Branch(TypedDict):
    """A way of taking the step."""

    name: str
    times: int
    loss: float | None
    effect: float
    later: float | None
    removed: float | None


class Explained(TypedDict):
    """What the file says."""

    step: int
    cause: str | None
    verdict: str
    where: Where | None
    rows: Sequence[Row]
    branches: Sequence[Branch]
    left_out: Sequence[str]


def read_explained(path: Path) -> str:
    """Read an explanation, and return it in HTML; raises :class:`UsageError` for a file that is none."""
    found = cast(Explained, checked_fields(read_json(path), get_type_hints(Explained), path))
    try:
        return _told(found)
    except OverflowError as error:
        raise UsageError(f"{path} cannot be used: it has a number that is too large for any loss or step.") from error


def departure_text(where: Mapping[str, Any]) -> str:
    """Say what left its history, and how surely."""
    what = {
        "effect": "the effect on the next loss",
        "lr": "the learning rate",
        "loss": "the loss",
        "copies": "how often one row stands in the batch",
    }.get(where["quantity"], f"{where['quantity']} of {where['name']}")
    return (
        f"step {where['step']:,}: {what} was {where['value']:.4g}, its median before {where['usual']:.4g} "
        f"(p = {where['p']:.2g} of {where['comparisons']:,} quantities)"
    )


def removed_text(removed: float | None) -> str:
    """Say what share of the harm a branch removes; nothing where it does far more harm itself."""
    return "" if removed is None or not removed >= -9 else f"{removed:.0%}"


def _told(found: Explained) -> str:
    """Return the verdict, where, the branches, and the rows that stand out."""
    where = found["where"]
    said = {
        "Where": departure_text(where) if where else "",
        "Also": ", ".join(where["others"]) if where else "",
        "Not in the branches": ", ".join(found["left_out"]),
    }
    told = "".join(_paragraph(f"{name}: {line}.") for name, line in said.items() if line)
    box = _paragraph(f"Cause: {found['cause'] or 'cannot be told'}") + _paragraph(found["verdict"])
    tables = {"Branches": (BRANCH, [*_branches(found)]), "Rows that stand out": (ROW, _rows(found))}
    drawn = [table(title, of, rows, level=4, most=MOST_LINES) for title, (of, rows) in tables.items() if rows]
    heading = f"<h3>Step {text(found['step'])}, explained</h3>"
    return f'<article>{heading}<div class="verdict">{box}</div>{told}{"".join(drawn)}</article>'


def _branches(found: Explained) -> Iterator[list[object]]:
    for branch in found["branches"]:
        numbers = cells(branch, ("times", "loss", "effect", "later"))
        yield [BRANCHES.get(branch["name"], branch["name"]), *numbers, removed_text(branch.get("removed"))]


def _rows(found: Explained) -> list[list[object]]:
    """Return the rows that stand out, each once, the largest loss first."""
    rows = {}
    for row in found["rows"]:
        index = row.get("index")
        if row["stands_out"]:
            description = " ".join(str(row.get("description") or "").split())
            name = f"place {row['place']}" if index is None else index
            rows[name] = (row["loss"], [name, *cells(row, ("loss", "gradient_norm")), description])
    by_loss = sorted(rows.values(), key=lambda row: math.inf if math.isnan(row[0]) else row[0], reverse=True)
    return [row for _, row in by_loss]


def _paragraph(line: str) -> str:
    return f"<p>{text(line, LONGEST_SENTENCE)}</p>"
