"""Jobs in progress, and jobs on this machine, which the command that wants them starts a few at a time."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..checkpoints import is_locked
from ..errors import UsageError, counted, listed, notice, short_path
from .cluster import submit
from .command_job import CommandJob
from .job import ProgramJob
from .job_records import JobRecord, read_job, states_of

POLL_INTERVAL = 0.5  # seconds between two looks


@dataclass
class LocalJobs:
    """Jobs on this machine that wait or run, at most ``at_once`` at a time."""

    executor: Any
    waiting: list[ProgramJob | CommandJob]
    running: dict[Path, JobRecord]
    at_once: int

    def ended(self, show: Callable[[Mapping[Path, JobRecord]], None] | None = None) -> Iterator[tuple[Path, JobRecord]]:
        """Start the jobs, show those that run, and yield the folder of each run whose job has ended.

        Ctrl-C ends the command that waits, and not the jobs, which a notice reports.
        """
        try:
            yield from self._ended(show)
        except KeyboardInterrupt:
            if self.running:
                number, job = counted(len(self.running), "job"), next(iter(self.running.values()))
                notice(f"{number} still running; the same command waits for them. To stop one: kill {job.id}")
            raise

    def _ended(self, show: Callable[[Mapping[Path, JobRecord]], None] | None) -> Iterator[tuple[Path, JobRecord]]:
        while self.waiting or self.running:
            while self.waiting and len(self.running) < self.at_once:
                job = self.waiting.pop(0)
                (self.running[job.folder],) = submit(self.executor, [job])
            states = states_of(self.running.values())
            if show is not None:
                show(self.running)
            for folder, record in [*self.running.items()]:
                if states[record.id] == "ended" and not is_locked(folder):
                    del self.running[folder]
                    yield folder, record
            time.sleep(POLL_INTERVAL if self.running else 0.0)


def jobs_in_progress(folders: Sequence[Path], *, overwrite: bool) -> dict[Path, JobRecord]:
    """Return the jobs that wait or run, by the folder of their run.

    Raises:
        UsageError: if the state of a job is not known, or the run of such a job would be overwritten.
    """
    jobs = {folder: job for folder in folders if (job := read_job(folder)) is not None}
    states = states_of(jobs.values())
    if lost := [f"{job.id} of {short_path(folder)}" for folder, job in jobs.items() if states[job.id] == "unknown"]:
        raise UsageError(
            f"It is not known whether these jobs have ended: {listed(lost, 3)}; their scheduler does not answer here. "
            f"Start the command where they were submitted ({next(iter(jobs.values())).host})."
        )
    running = {folder: job for folder, job in jobs.items() if states[job.id] != "ended" or is_locked(folder)}
    if running and overwrite:
        names = listed([f"{job.id} in {short_path(folder)}" for folder, job in running.items()], 3)
        raise UsageError(f"--overwrite would replace runs whose jobs have not ended: {names}. Cancel these jobs first.")
    return running


def submission_lines(
    records: Sequence[JobRecord], running: Mapping[Path, JobRecord], completed: int, folder: Path
) -> Iterator[str]:
    """Yield lines about what was submitted, and how to follow it."""
    if records:
        ids = records[0].id if len(records) == 1 else f"{records[0].id} to {records[-1].id}"
        yield f"Submitted {counted(len(records), 'job')}: {ids}; output in {short_path(records[0].logs)}."
    if running:
        yield f"{counted(len(running), 'run')} already in a job: {listed([job.id for job in running.values()])}."
    if completed:
        yield f"{counted(completed, 'run')} already completed."
    yield f"The same command resumes what has not completed. To watch: loopscope ls {short_path(folder)} --watch"
