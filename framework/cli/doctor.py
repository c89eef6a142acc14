"""The command ``loopscope doctor RUN``: a diagnosis of a run, as text or JSON."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from ..doctor import Diagnosis, Severity, diagnose, diagnosis_lines
from ..errors import counted, listed, require
from ..runs import read_history, run_folders
from .output import Kept, Output, ReportedError, add_output_options
from .parser import CommandParser, line_width

WIDE = 100  # the longest line of text


def doctor_parser() -> CommandParser:
    """Build the parser of ``loopscope doctor``."""
    parser = CommandParser(
        "doctor RUN [--json] [--fail-on SEVERITY]",
        "Diagnose a run: what is wrong in its training, why, and what to do next. Works while it runs, too.",
    )
    parser.add_argument("RUN", nargs="*", help="the folder of a run, or of an experiment for all its strategies")
    add_output_options(parser)
    severities = "exit with status 1 if a finding has at least this severity"
    parser.add("fail_on", Literal["info", "warning", "critical"] | None, severities)
    return parser


def doctor(words: Sequence[str]) -> None:
    """Diagnose the runs in a folder.

    Raises:
        UsageError: for bad input.
        ReportedError: if ``--fail-on`` is given and a finding has at least its severity.
    """
    parser = doctor_parser()
    given = parser.defaults | parser.parse(words)
    require(len(given["RUN"]) == 1, f"loopscope doctor takes the folder of one run, but got {len(given['RUN'])}.")
    folders = run_folders(Path(given["RUN"][0]), "doctor")
    diagnoses = {folder: diagnose(read_history(folder)) for folder in folders}
    content = _as_json(diagnoses)
    fields = ("missing", "findings", "runs")
    cut: dict[str, Kept] = {name: "first" for name in fields if name in content}
    Output.of("doctor", words, given).write(content, cut, lambda: _lines(diagnoses))
    if given["fail_on"] is not None:
        _fail_on(given["fail_on"], diagnoses)


def _as_json(diagnoses: dict[Path, Diagnosis]) -> dict[str, Any]:
    """Return the diagnosis of one run, or those of several in a list."""
    items = [
        {"run": str(folder), "verdict": diagnosis.verdict, **diagnosis.as_dict()}
        for folder, diagnosis in diagnoses.items()
    ]
    return items[0] if len(items) == 1 else {"runs": items}


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
    """Raise :class:`ReportedError` if a finding has at least a severity."""
    failing = [str(folder) for folder, diagnosis in diagnoses.items() if diagnosis.at_least(severity)]
    if failing:
        raise ReportedError(f"Findings of severity {severity} or higher: {listed(failing, 3)}.")
