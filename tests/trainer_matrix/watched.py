"""The outcome of rows under ``loopscope watch``: scripts, trained twice alone and once watched, have the same bytes."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.trainer_matrix.one_training import lines_of_records, reporting_hooks
from tests.trainer_matrix.outcome import ENVIRONMENT, Outcome, compared, first_difference
from tests.trainer_matrix.row import Row

ROOT = Path(__file__).parents[2]
WATCH = ("-m", "loopscope", "watch", "--with-hooks", "health", "--log-every", "3", "--", sys.executable)
"""The arguments of Python that let ``loopscope watch`` start a command."""


def watched_outcomes(rows: Sequence[Row], jobs: int) -> Iterator[Outcome]:
    """Train all rows in three commands, and yield the comparison of each row."""
    installed = [row for row in rows if not row.absent]
    with TemporaryDirectory() as folder:
        forms = {name: Path(folder, name) for name in ("alone", "again", "watched")}
        for name, path in forms.items():
            before = WATCH if name == "watched" else ()
            command = [sys.executable, *before, "-m", "tests.trainer_matrix.scripts", str(path), str(jobs)]
            subprocess.run([*command, *[row.name for row in installed]], cwd=ROOT, env=os.environ | ENVIRONMENT)
        for row in rows:
            if row.absent:
                yield Outcome(row, "not installed", ", ".join(row.absent))
            else:
                yield watched_outcome(row, *[path / str(installed.index(row)) for path in forms.values()])


def watched_outcome(row: Row, alone: Path, again: Path, watched: Path) -> Outcome:
    """Compare three trainings of a row, from their folders."""
    one, two, three = map(results_in, (alone, again, watched))
    if errors := [result["error"] for result in one if result["error"]]:
        return Outcome(row, "fails", f"without loopscope: {errors[0]}")
    for first, second in zip(one, two, strict=True):
        if difference := first_difference(first["steps"], second["steps"]):
            return Outcome(row, "fails", f"two trainings without loopscope differ {difference}")
    found = compared(row, one, three)
    return replace(found, recorded=max((line.get("step", 0) for line in lines_of_records(watched)), default=0))


def results_in(folder: Path) -> list[dict[str, Any]]:
    """Return the results of the ranks, with the hooks that have reported up to the end of the process."""
    results: list[dict[str, Any]] = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    return [result | {"hooks": sorted(reporting_hooks(folder))} for result in results]
