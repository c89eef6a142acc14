"""Command that trains the rows of the matrix and prints the table; ``--write`` writes docs/data/trainer-matrix.txt."""

import argparse
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from docs.dates import today
from tests.trainer_matrix.outcome import Outcome, outcome
from tests.trainer_matrix.table import ROWS
from tests.trainer_matrix.watched import watched_outcomes
from tests.trainer_matrix.written_table import name_of, summary, written_table

DATA = Path(__file__).parents[2] / "docs" / "data" / "trainer-matrix.txt"
WATCHED = DATA.with_name("watched-trainings.txt")
HEAD = "| configuration | versions | steps | hooks | result |\n|---|---|---|---|---|\n"
WATCHED_HEAD = "| configuration | steps | recorded up to | hooks | result |\n|---|---|---|---|---|\n"


def main(arguments: Sequence[str]) -> int:
    """Train the chosen rows, print their table, and return 1 if a row has a result that it must not have."""
    parser = argparse.ArgumentParser(prog="python -m tests.trainer_matrix", description=__doc__)
    parser.add_argument("--only", nargs="+", default=[], metavar="TEXT", help="only rows whose name contains a text")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="number of rows that train at the same time")
    parser.add_argument("--list", action="store_true", help="print the names of the rows and end")
    parser.add_argument(
        "--write", action="store_true", help="write the table to docs/data; with --only, renew these rows"
    )
    parser.add_argument("--watch", action="store_true", help="train scripts alone and under loopscope watch")
    chosen = parser.parse_args(arguments)
    rows = [row for name, row in ROWS.items() if not chosen.only or any(text in f"{name}:" for text in chosen.only)]
    if chosen.list:
        write("\n".join(row.name for row in rows) + "\n")
        return 0
    head, data, line_of = (WATCHED_HEAD, WATCHED, watched_line) if chosen.watch else (HEAD, DATA, line)
    outcomes = []
    write(head)
    with ThreadPoolExecutor(chosen.jobs) as pool:
        rows = [row for row in rows if not (chosen.watch and row.control)]
        for result in watched_outcomes(rows, chosen.jobs) if chosen.watch else pool.map(outcome, rows):
            outcomes.append(result)
            write(line_of(result))
    lines = [line_of(result) for result in outcomes]
    write(f"\n{summary(lines)}\n")
    if chosen.write:
        earlier = data.read_text(encoding="utf-8") if chosen.only else ""
        table = written_table(head, zip(outcomes, lines, strict=True), today(), earlier)
        data.write_text(table, encoding="utf-8")
        write("`make docs` renews the summary of the page, by the packages of the site.\n")
    return int(not all(result.is_accepted for result in outcomes))


def line(result: Outcome) -> str:
    """Return the line of the table for an outcome."""
    row, text = result.row, result.sentence.replace("|", "\\|")
    return (
        f"| {name_of(row)} | {row.versions or 'torch only'} | {result.steps or ''} | {result.hooks or ''} | {text} |\n"
    )


def watched_line(result: Outcome) -> str:
    """Return the line of the table for an outcome under ``loopscope watch``."""
    row, text = result.row, result.sentence.replace("|", "\\|")
    return f"| {name_of(row)} | {result.steps or ''} | {result.recorded or ''} | {result.hooks or ''} | {text} |\n"


def write(text: str) -> None:
    """Write to standard output at once, so that a long run shows its progress."""
    sys.stdout.write(text)
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
