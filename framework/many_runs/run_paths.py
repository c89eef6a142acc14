"""The walk through a folder for the runs in it."""

import os
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from operator import attrgetter
from pathlib import Path

from ..report import FoundRun, inspect_run
from ..runs import CONFIG, REWINDS, SETTINGS


def find_runs(folder: Path, read: Collection[str] = SETTINGS) -> list[FoundRun]:
    """Return all runs in a folder and its subfolders, by path, including unreadable ones with their problem.

    The endings ``read`` are those of :func:`~loopscope.report.inspect_run`.
    """
    return found_runs(run_paths(folder), partial(inspect_run, read=read))


def found_runs(paths: Iterable[tuple[Path, str]], inspect: Callable[[Path], FoundRun]) -> list[FoundRun]:
    """Return the runs at the results of :func:`run_paths`, by path."""
    runs = [FoundRun(path, "damaged", problem=problem) if problem else inspect(path) for path, problem in paths]
    return sorted(runs, key=attrgetter("path.parts"))


def run_paths(folder: Path) -> Iterator[tuple[Path, str]]:
    """Yield all folders of runs in a folder and its subfolders, and unreadable folders with their problem.

    Links within the folder are not followed, since they may lead anywhere. Rewinds belong to their run.
    """
    pending = [str(folder)]
    while pending:
        here = pending.pop()
        try:
            entries = list(os.scandir(here))
        except OSError as error:
            yield Path(here), f"{here} cannot be read: {error.strerror}."
            continue
        if any(entry.name == CONFIG for entry in entries):
            yield Path(here), ""
            entries = [entry for entry in entries if entry.name != REWINDS]
        pending += [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
