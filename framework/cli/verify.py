"""The command ``loopscope verify``: trains runs again, and compares them with their checkpoints and digests."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from random import Random
from typing import Any

from ..checkpoints import checkpoints_by_moment
from ..console import make_console, watch
from ..errors import counted, listed, require, short_path
from ..runs import ALL, DivergedError, RunFolder, Session, StepRange, changed_files, run_folders
from ..training import is_main_process
from .options import without_dots
from .output import Output, ReportedError, with_output_options
from .parser import CommandParser
from .recorded_run import RecordedRun, add_hook_options, given_hooks
from .user_errors import user_errors
from .watched_run import WatchedRun


def verify_parser() -> CommandParser:
    """Build the parser of ``loopscope verify``."""
    parser = CommandParser(
        "verify RUN [--intervals N] [hooks]",
        "Train a run again, and compare it bit for bit with its checkpoints and digests. The folder of the run is not "
        "changed. If the runs differ, report the step and the tensor of the first difference, and exit with status 1.",
    )
    run = "the folder of one run, OUTPUT/EXPERIMENT/STRATEGY, or OUTPUT/EXPERIMENT for all runs"
    parser.add_argument("RUN", nargs="*", help=run)
    parser.add("intervals", int, "train only N random intervals between two checkpoints (default: the whole run)")
    add_hook_options(parser, "only those that change the run")
    parser.add_argument("--traceback", action="store_true", help="show the full traceback of an error")
    return with_output_options(parser)


def verify(words: Sequence[str]) -> None:
    """Compare runs with their checkpoints and digests; raises :class:`ReportedError` at the first difference."""
    given = verify_parser().complete(without_dots(words))
    require(len(given["RUN"]) == 1, "loopscope verify takes the folder of a run: loopscope verify RUN.")
    number, hooks = given["intervals"], given_hooks(given)
    require(number is None or number >= 1, f"--intervals is {number}; it must be at least 1.")
    if not (hooks["with_hooks"] or hooks["hooks"]):
        hooks["with_hooks"] = "none"
    compared: list[dict[str, Any]] = []
    damaged: list[str] = []
    difference = None
    for folder in run_folders(Path(given["RUN"][0]), "verify"):
        try:
            with user_errors(full_traceback=given["traceback"]):
                watched = WatchedRun.read(folder)
                damaged += [change.sentence for change in changed_files(folder, ALL).values() if change.is_damage]
                if watched is not None:
                    problem = "--intervals starts from checkpoints, which a watched run does not have; leave it out."
                    require(number is None, problem)
                    compared.append(_identical(folder, folder.name, steps=watched.verify(hooks)))
                    continue
                run = RecordedRun.read(folder)
                session = replace(run.session(**hooks), make_sinks=list)
                if number is None:
                    compared += _verify_whole(session, folder, is_shown=not given["json"])
                else:
                    compared += _verify_intervals(session, RunFolder(folder, run.record.strategy), number)
        except DivergedError as error:
            difference = error
            compared.append({"run": str(folder), "name": folder.name, "identical": False, "difference": str(error)})
            break
    content = {"identical": difference is None, "damaged": damaged, "runs": compared}
    if is_main_process():
        identical = [row for row in compared if row["identical"]]
        Output.of("verify", words, given).write(content, {"runs": "first"}, lambda: list(map(_line, identical)))
    if difference is not None:
        raise ReportedError(str(difference)) from difference
    if damaged:
        raise ReportedError(f"Not all files are those of the runs. {' '.join(damaged)}")


def _line(row: Mapping[str, Any]) -> str:
    if "until" in row:
        return f"{row['name']}, steps {row['step']:,} to {row['until']:,}: identical bit for bit"
    return f"{row['name']}: identical bit for bit at {counted(len(row['steps']), 'step')}: {listed(row['steps'])}"


def _identical(folder: Path, name: str, **steps: Any) -> dict[str, Any]:
    return {"run": str(folder), "name": name, "identical": True, **steps}


def _verify_whole(session: Session, folder: Path, *, is_shown: bool) -> list[dict[str, Any]]:
    """Train the whole run again; on a terminal with a progress bar."""
    has_bar = is_shown and is_main_process() and make_console().is_terminal
    compared = watch(session, "silent", Session.validate) if has_bar else session.validate()
    return [_identical(folder, name, steps=list(steps)) for name, steps in compared.items()]


def _verify_intervals(session: Session, folder: RunFolder, number: int) -> list[dict[str, Any]]:
    """Train random intervals between two checkpoints again."""
    steps = sorted({step for _, step in checkpoints_by_moment(folder.checkpoints)})
    intervals = [StepRange(start + 1, end) for start, end in pairwise([0, *steps])]
    advice = "omit --intervals to compare it with its digests"
    problem = f"{short_path(folder.path)} has no intact checkpoint to start from; {advice}."
    require(bool(intervals), problem)
    # All processes of torchrun have the same port, so they draw the same intervals.
    drawn = Random(os.environ.get("MASTER_PORT")).sample(intervals, min(number, len(intervals)))
    compared = []
    for interval in sorted(drawn, key=attrgetter("step")):
        session.rewind(interval, recorded=False)
        compared.append(_identical(folder.path, folder.name, step=interval.step, until=interval.until))
    return compared
