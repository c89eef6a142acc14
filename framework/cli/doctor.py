"""The command ``loopscope doctor RUN``: a diagnosis of a run, as text or JSON."""

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from ..doctor import Diagnosis, Severity, diagnosis_lines
from ..errors import counted, listed, require
from ..many_runs import IndexedRuns, indexed_runs
from ..runs import READ, RunRecord, read_step_times
from .finding_groups import finding_groups, group_lines
from .output import Kept, Output, ReportedError, with_output_options
from .parser import CommandParser, given_run, line_width

WIDE = 100  # the longest line of text
BRANCHES, STEPS = 4, 10


def doctor_parser() -> CommandParser:
    """Build the parser of ``loopscope doctor``."""
    about = "Diagnose a run: what is wrong in its training, why, and what to do next. Works while it runs, too."
    parser = CommandParser("doctor RUN [--test] [--json] [--fail-on SEVERITY]", about)
    parser.add_argument("RUN", nargs="*", help="the folder of a run, or a folder with runs at any depth")
    with_output_options(parser)
    severities = "exit with status 1 if a finding has at least this severity"
    test = "rewind the run to before each finding, and try one change at a time in branches; trains about 30 branches"
    parser.add("test", bool, test, default=False)
    parser.add("branches", int, "with --test: branches of each kind, at least 4", default=BRANCHES)
    parser.add("steps", int, "with --test: steps of a branch, at least 2", default=STEPS)
    parser.add("fail_on", Literal["info", "warning", "critical"] | None, severities)
    return parser


def doctor(words: Sequence[str]) -> None:
    """Diagnose the runs in a folder.

    Raises:
        UsageError: for bad input.
        ReportedError: if ``--fail-on`` is given and a finding has at least its severity.
    """
    given = doctor_parser().complete(words)
    place = given_run(given, "doctor")
    is_changed = (given["branches"], given["steps"]) != (BRANCHES, STEPS)
    require(given["test"] or not is_changed, "--branches and --steps are options of the tests; add --test.")
    with indexed_runs() as runs:
        folders = runs.folders(place, "doctor")
        diagnosed = {folder: _diagnosed(folder, runs) for folder in folders}
    diagnoses = {folder: diagnosis for folder, (diagnosis, _) in diagnosed.items()}
    if given["test"]:
        from .doctor_tests import with_tests  # trains, unlike the diagnosis of a record

        diagnoses = {
            folder: with_tests(folder, diagnosis, given["branches"], given["steps"], as_json=given["json"])
            for folder, diagnosis in diagnoses.items()
        }
    records = [record for _, record in diagnosed.values()]
    groups = finding_groups([*diagnoses.values()], records) if len(diagnoses) > 1 else []
    content = _as_json(diagnoses) | ({"groups": groups} if len(diagnoses) > 1 else {})
    fields = ("missing", "findings", "runs", "groups")
    cut: dict[str, Kept] = {name: "first" for name in fields if name in content}
    Output.of("doctor", words, given).write(content, cut, partial(_lines, diagnoses, groups))
    if given["fail_on"] is not None:
        _fail_on(given["fail_on"], diagnoses)


def _diagnosed(folder: Path, runs: IndexedRuns) -> tuple[Diagnosis, RunRecord]:
    """Return the diagnosis of a run, with a sentence about lost or damaged files, and its record."""
    diagnosis, run = runs.diagnosis(folder), runs.run(folder, READ)
    diagnosis = replace(diagnosis, missing=[run.problem, *diagnosis.missing]) if run.problem else diagnosis
    return diagnosis, run.record or RunRecord.read(folder)


def _as_json(diagnoses: dict[Path, Diagnosis]) -> dict[str, Any]:
    """Return the diagnosis of one run, or those of several in a list."""
    items = [{"run": str(folder), "verdict": item.verdict, **item.as_dict()} for folder, item in diagnoses.items()]
    return items[0] if len(items) == 1 else {"runs": items}


def _lines(diagnoses: dict[Path, Diagnosis], groups: Sequence[Mapping[str, Any]]) -> list[str]:
    width = min(line_width(), WIDE)
    lines = [*group_lines(groups, len(diagnoses), width)]
    for folder, diagnosis in diagnoses.items():
        problems = len(diagnosis.at_least("warning"))
        counts = ["not checked" if diagnosis.unchecked and not problems else counted(problems, "problem")]
        notes = len(diagnosis) - len(diagnosis.at_least("warning"))
        lines.append(f"{folder}: {listed([*counts, *([counted(notes, 'remark')] if notes else [])])}")
        lines += [f"  {line}" for line in diagnosis_lines(diagnosis, width - 2)]
        if times := read_step_times(folder):
            lines += textwrap.wrap(f"A step takes {times}.", width, initial_indent="  ", subsequent_indent=6 * " ")
    return lines


def _fail_on(severity: Severity, diagnoses: dict[Path, Diagnosis]) -> None:
    """Raise :class:`ReportedError` if a finding has at least a severity."""
    failing = [str(folder) for folder, diagnosis in diagnoses.items() if diagnosis.at_least(severity)]
    if failing:
        raise ReportedError(f"Findings of severity {severity} or higher: {listed(failing, 3)}.")
