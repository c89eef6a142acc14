"""Explanations of steps as HTML."""

from collections.abc import Iterator
from pathlib import Path

from ..durable_files import read_json
from ..errors import UsageError
from ..laboratory import FIELDS, Explanation
from ..runs import checked_fields
from .tables import cells, table, text

MOST_LINES, LONGEST_SENTENCE = 20, 2000
BRANCH, ROW = ("", "times", "loss", "next losses", "later", "removed"), ("row", "loss", "gradient norm", "what it is")


def read_explained(path: Path) -> str:
    """Read an explanation, and return it as HTML; raises :class:`UsageError` for an invalid file."""
    explanation = Explanation.of(checked_fields(read_json(path), FIELDS, path))
    try:
        return _html_of(explanation)
    except OverflowError as error:
        raise UsageError(f"{path} cannot be used: it has a number too large for a loss or a step.") from error


def _html_of(explanation: Explanation) -> str:
    """Return the verdict, the departure, the branches, and the outlier rows."""
    where = explanation.where
    lines = {
        "Where": str(where or ""),
        "Also": ", ".join(where.others) if where else "",
        "Not in the branches": ", ".join(explanation.left_out),
    }
    paragraphs = "".join(_paragraph(f"{name}: {line}.") for name, line in lines.items() if line)
    box = _paragraph(f"Cause: {explanation.cause or 'unknown'}") + _paragraph(explanation.verdict)
    tables = {"Branches": (BRANCH, [*_branches(explanation)]), "Outlier rows": (ROW, [*_rows(explanation)])}
    drawn = [table(title, head, rows, level=4, most=MOST_LINES) for title, (head, rows) in tables.items() if rows]
    heading = f"<h3>Step {text(explanation.step)}, explained</h3>"
    return f'<article>{heading}<div class="verdict">{box}</div>{paragraphs}{"".join(drawn)}</article>'


def _branches(explanation: Explanation) -> Iterator[list[object]]:
    for branch in explanation.branches:
        numbers = cells(vars(branch), ("times", "loss", "effect", "later"))
        yield [branch.title, *numbers, branch.removed_text]


def _rows(explanation: Explanation) -> Iterator[list[object]]:
    """Yield the outlier rows, each once, largest loss first."""
    for row in explanation.outlier_rows:
        name = f"place {row.place}" if row.index is None else row.index
        description = " ".join(str(row.description or "").split())
        yield [name, *cells(vars(row), ("loss", "gradient_norm")), description]


def _paragraph(line: str) -> str:
    return f"<p>{text(line, LONGEST_SENTENCE)}</p>"
