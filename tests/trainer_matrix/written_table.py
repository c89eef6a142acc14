"""The tables of docs/data, of which a run may renew only some rows."""

import platform
import re
from collections import Counter
from collections.abc import Iterable, Sequence

import torch

from tests.trainer_matrix.outcome import Outcome
from tests.trainer_matrix.row import ROWS, Row

EARLIER = re.compile(r"Trained (?:on|from) (\d+ \w+ \d{4})")


def name_of(row: Row) -> str:
    """Return the name of a row in its table."""
    return row.name if row.ranks == 1 else f"{row.name}, {row.ranks} ranks"


def kinds_of(lines: Iterable[str]) -> Counter[str]:
    """Return the number of lines by the kind of their result, the last cell.

    >>> kinds_of(["| a | 3 | equal |\\n", "| b | 3 | differs, as it must: at step 1 |\\n"])
    Counter({'equal': 1, 'differs, as it must': 1})
    """
    return Counter(line.rstrip().removesuffix("|").rpartition(" | ")[2].partition(":")[0].strip() for line in lines)


def summary(lines: Sequence[str]) -> str:
    """Return the number of rows by result, and the versions."""
    counts = ", ".join(f"{count} × {kind}" for kind, count in kinds_of(lines).most_common())
    return f"{len(lines)} rows: {counts}. torch {torch.__version__}, Python {platform.python_version()}."


def written_table(head: str, lines: Iterable[tuple[Outcome, str]], day: str, earlier: str = "") -> str:
    """Return the text of a table, with date and summary.

    Args:
        head: the headings.
        lines: the outcomes with their lines.
        day: the date.
        earlier: the text of the table whose other rows are kept; empty: there are none.
    """
    kept = {line.split(" | ")[0].removeprefix("| "): line for line in earlier.splitlines(keepends=True)}
    renewed = {name_of(outcome.row): line for outcome, line in lines}
    names = [name_of(row) for row in ROWS.values()]
    rows = [(kept | renewed)[name] for name in names if name in kept or name in renewed]
    first = EARLIER.match(earlier)
    is_older = first is not None and first[1] != day and any(name in kept.keys() - renewed for name in names)
    dates = f"from {first[1]} to {day}" if first is not None and is_older else f"on {day}"
    return f"Trained {dates}.\n\n{summary(rows)}\n\n{head}{''.join(rows)}"
