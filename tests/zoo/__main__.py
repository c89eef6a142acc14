"""Command that trains the cases of the zoo and prints the table; ``--write`` writes docs/data/zoo.txt."""

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

from docs import long_pages
from tests.zoo.case import Case
from tests.zoo.outcome import DATA, Outcome, outcome_of, recorded_outcome
from tests.zoo.page import page
from tests.zoo.table import HEAD, chosen_cases, line, summary


def main(arguments: Sequence[str]) -> int:
    """Train the chosen cases and print their table; return 1 if a training ended with an error."""
    parser = argparse.ArgumentParser(prog="python -m tests.zoo", description=__doc__)
    parser.add_argument("--only", nargs="+", default=[], metavar="TEXT", help="only cases whose name contains a text")
    parser.add_argument("--kind", choices=("fault", "healthy"), help="only faults, or only healthy trainings")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="number of cases that train at the same time")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the records in this folder")
    parser.add_argument("--records", type=Path, metavar="FOLDER", help="diagnose the records in this folder again")
    parser.add_argument("--unedited", action="store_true", help="let custom loops make no call of their scope")
    parser.add_argument("--list", action="store_true", help="print the names of the cases and end")
    parser.add_argument("--write", action="store_true", help="write the table of all cases to docs/data/zoo.txt")
    chosen = parser.parse_args(arguments)
    cases = [case for case in chosen_cases(chosen.only) if chosen.kind in (None, case.kind)]
    if chosen.list:
        write("".join(f"{case.name}: {case.sentence}\n" for case in cases))
        return 0
    started, outcomes = time.monotonic(), []
    write(HEAD)
    for outcome in outcomes_of(cases, chosen.jobs, chosen.keep, chosen.records, unedited=chosen.unedited):
        outcomes.append(outcome)
        write(line(outcome))
    write(
        f"\n{summary(outcomes)}\n{len(outcomes)} cases in {time.monotonic() - started:.0f} seconds, "
        f"with {sum(outcome.seconds for outcome in outcomes):.0f} seconds of processor time for the trainings.\n"
    )
    if chosen.write:
        DATA.write_text(page(outcomes), encoding="utf-8")
        long_pages.write()
    return int(any(outcome.result == "error" for outcome in outcomes))


def outcomes_of(
    cases: Sequence[Case], jobs: int, keep: Path | None = None, records: Path | None = None, *, unedited: bool = False
) -> Iterator[Outcome]:
    """Train cases in processes, or read their records, and yield their outcomes in order."""
    names = [case.name for case in cases]
    if records is not None:
        yield from (recorded_outcome(name, records) for name in names)
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    context = get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        yield from pool.map(partial(outcome_of, keep=keep, unedited=unedited), names)


def write(text: str) -> None:
    """Write to standard output at once, so that a long run shows its progress."""
    sys.stdout.write(text)
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
