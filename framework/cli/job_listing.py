"""Jobs in ``loopscope ls``: their identifiers and states, runs that have not begun, and the option ``--watch``."""

import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..console import make_console
from ..report import FoundRun
from ..sweeps import JOB, JobRecord, State, states_of, submitted_jobs

INTERVAL = 2.0  # seconds between two looks
CLEAR = "\x1b[H\x1b[2J"


@dataclass(frozen=True)
class ListedJobs:
    """The jobs of the runs in some folders, with their states."""

    jobs: Mapping[Path, JobRecord]
    states: Mapping[str, State]

    @classmethod
    def of(cls, folders: Iterable[Path]) -> "ListedJobs":
        """Read the records of the jobs, and ask their schedulers."""
        jobs = {path: job for folder in folders for path, job in submitted_jobs(folder).items()}
        return cls(jobs, states_of(jobs.values()))

    def not_begun(self, runs: Sequence[FoundRun]) -> list[FoundRun]:
        """Return the runs whose jobs have not written a record; if such a job has ended, the problem names its log."""
        known = {run.path for run in runs}
        return [
            FoundRun(path, f"job {state}", problem=f"no run was written; see {job.log('err')}" * (state == "ended"))
            for path, job in self.jobs.items()
            if path not in known and (state := self.states[job.id])
        ]

    def text(self, run: FoundRun) -> str:
        """Return the job of a run in a few words; empty without one."""
        job = self.jobs.get(run.path)
        if job is None:
            return ""
        is_waiting = self.states[job.id] == "pending" and not run.state.startswith("job")
        return f"{job.id} pending" if is_waiting else job.id

    def content(self, run: FoundRun) -> dict[str, Any]:
        """Return the job of a run as plain values, and for a run that has not begun the time of its submission."""
        job = self.jobs.get(run.path)
        if job is None:
            return {}
        submitted = time.localtime((run.path / JOB).stat().st_mtime)
        started = {} if run.began else {"started": time.strftime("%Y-%m-%dT%H:%M:%S%z", submitted)}
        return {"job": {"id": job.id, "state": self.states[job.id]}} | started

    def are_open(self, runs: Sequence[FoundRun]) -> bool:
        """Return whether a run is in progress, or a job will start or continue one."""
        is_running = any(run.state == "running" for run in runs)
        return is_running or any(state in ("pending", "running") for state in self.states.values())


def watch_lines(
    look: Callable[[], tuple[Sequence[FoundRun], ListedJobs]],
    lines_of: Callable[[Sequence[FoundRun], ListedJobs], Sequence[str]],
) -> None:
    """Show runs again and again until none is in progress; where output is no terminal, whenever a line changes."""
    is_terminal = make_console().is_terminal
    shown: Sequence[str] = ()
    while True:
        runs, jobs = look()
        lines = lines_of(runs, jobs)
        if is_terminal or lines != shown:
            sys.stdout.write("".join([CLEAR * is_terminal, *(f"{line}\n" for line in lines)]))
            sys.stdout.flush()
        shown = lines
        if not jobs.are_open(runs):
            return
        time.sleep(INTERVAL)
