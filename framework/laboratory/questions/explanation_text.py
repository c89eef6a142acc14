"""Text output of explanations."""

import textwrap
from collections.abc import Iterator, Sequence

from ...console import in_columns, number_text, printable
from ..explained_step import Branch, ExplainedRow, Explanation, by_loss

MOST_ROWS = 5


def explanation_lines(explanation: Explanation, width: int) -> Iterator[str]:
    """Yield the lines of an explanation: departure, branches, rows that stand out, verdict."""

    def wrapped(text: str) -> list[str]:
        return textwrap.wrap(text, width, subsequent_indent="  ")

    if explanation.where is not None:
        yield from wrapped(f"Where: {explanation.where}.")
        if explanation.where.others:
            yield from wrapped(f"Also: {', '.join(explanation.where.others)}.")
    if explanation.branches:
        yield ""
        yield from in_columns([_row(branch) for branch in explanation.branches], width, ("", "removed"))
        if explanation.left_out:
            yield from wrapped(f"Not in the branches: {', '.join(explanation.left_out)}.")
    if rows := explanation.outlier_rows:
        yield ""
        yield from row_table(rows, width)
    yield ""
    yield from wrapped(explanation.verdict)
    if explanation.folder is not None:
        yield f"Written to {explanation.folder}"


def row_table(rows: Sequence[ExplainedRow], width: int) -> Iterator[str]:
    """Yield a table of the rows with the largest losses."""
    table = [
        {
            "row": str(row.place if row.index is None else row.index),
            "loss": number_text(row.loss),
            "gradient norm": number_text(row.gradient_norm),
            "is": "" if row.description is None else printable(" ".join(str(row.description).split())),
        }
        for row in by_loss(rows)[:MOST_ROWS]
    ]
    yield from in_columns(table, width, ("row", "is"))


def _row(branch: Branch) -> dict[str, str]:
    times = f" ({branch.times})" if branch.times > 1 else ""
    numbers = {"loss": branch.loss, "next losses": branch.effect, "later": branch.later}
    shown = {name: "" if value is None else number_text(value) for name, value in numbers.items()}
    return {"": branch.title + times, **shown, "removed": branch.removed_text}
