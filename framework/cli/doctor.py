"""The command ``loopscope doctor RUN``: a diagnosis of a run, as text or JSON."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from ..doctor import Diagnosis, Severity, diagnose, diagnosis_lines
from ..errors import LoopscopeError, counted, listed, require
from ..runs import read_history, run_folders
from .parser import CommandParser, line_width, write_line

WIDE = 100  # the longest line of text


def doctor_parser() -> CommandParser:
    """Build the parser of ``loopscope doctor``."""
    parser = CommandParser(
        "doctor RUN [--json] [--fail-on SEVERITY]",
        "Diagnose a run: what is wrong in its training, why, and what to do next. Works while it runs, too.",
    )
    parser.add_argument("RUN", nargs="*", help="the folder of a run, or of an experiment for all its strategies")
    parser.add_argument("--json", action="store_true", help="write one JSON object")
    severities = "exit with status 1 if a finding has at least this severity"
    parser.add("fail_on", Literal["info", "warning", "critical"] | None, severities)
    return parser


def doctor(words: Sequence[str]) -> None:
    """Diagnose the runs in a folder.

    Raises:
        UsageError: for bad input.
        LoopscopeError: if ``--fail-on`` is given and a finding has at least its severity.
    """
    parser = doctor_parser()
    given = parser.defaults | parser.parse(words)
    require(len(given["RUN"]) == 1, f"loopscope doctor takes the folder of one run, but got {len(given['RUN'])}.")
    folders = run_folders(Path(given["RUN"][0]), "doctor")
    diagnoses = {folder: diagnose(read_history(folder)) for folder in folders}
    if given["json"]:
        sys.stdout.write(json.dumps(_as_json(diagnoses), indent=2) + "\n")
    else:
        for line in _lines(diagnoses):
            write_line(line)
    if given["fail_on"] is not None:
        _fail_on(given["fail_on"], diagnoses)


def _as_json(diagnoses: dict[Path, Diagnosis]) -> dict[str, Any]:
    """Return the diagnosis of one run, or those of several in a list."""
    items = [{**diagnosis.as_dict(), "run": str(folder)} for folder, diagnosis in diagnoses.items()]
    return items[0] if len(items) == 1 else {"schema": items[0]["schema"], "runs": items}


def _lines(diagnoses: dict[Path, Diagnosis]) -> list[str]:
    width = min(line_width(), WIDE)
    lines = []
    for folder, diagnosis in diagnoses.items():
        counts = [counted(len(diagnosis.at_least("warning")), "problem")]
        notes = len(diagnosis) - len(diagnosis.at_least("warning"))
        lines.append(f"{folder}: {listed([*counts, *([counted(notes, 'remark')] if notes else [])])}")
        lines += [f"  {line}" for line in diagnosis_lines(diagnosis, width - 2)]
    return lines


def _fail_on(severity: Severity, diagnoses: dict[Path, Diagnosis]) -> None:
    """Raise :class:`LoopscopeError` if a finding has at least a severity."""
    failing = [str(folder) for folder, diagnosis in diagnoses.items() if diagnosis.at_least(severity)]
    if failing:
        raise LoopscopeError(f"Findings of severity {severity} or higher: {listed(failing, 3)}.")
