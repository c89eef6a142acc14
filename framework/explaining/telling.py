"""An explanation in lines for people."""

import textwrap
from collections.abc import Iterator

from ..console import in_columns, number_text, shortened
from ..report import BRANCHES, removed_text
from .explanation import Branch, Explanation

MOST_ROWS = 10


def told(explanation: Explanation, width: int) -> Iterator[str]:
    """Yield lines: where, the branches, the rows that stand out, the verdict."""

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
    if found := explanation.standing_out[:MOST_ROWS]:
        yield ""
        rows = [
            {
                "row": str(row.index if row.index is not None else f"place {row.place}"),
                "loss": number_text(row.loss),
                "gradient norm": number_text(row.gradient_norm),
                "": "" if row.description is None else shortened(str(row.description), width),
            }
            for row in found
        ]
        yield from (shortened(line, width, keep_end=False) for line in in_columns(rows, width, ("row", "")))
    yield ""
    yield from wrapped(explanation.verdict)
    if explanation.folder is not None:
        yield f"Written to {explanation.folder}"


def _row(branch: Branch) -> dict[str, str]:
    times = f" ({branch.times})" if branch.times > 1 else ""
    numbers = {"loss": branch.loss, "next losses": branch.effect, "later": branch.later}
    return {
        "": BRANCHES.get(branch.name, branch.name) + times,
        **{name: "" if value is None else number_text(value) for name, value in numbers.items()},
        "removed": removed_text(branch.removed),
    }
