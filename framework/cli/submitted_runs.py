"""The option ``--on``: runs as jobs of a cluster, or as jobs on this machine that outlive the command."""

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..checkpoints import is_locked
from ..console import Mode, RunConsole, RunsLine
from ..durable_files import read_lines
from ..errors import LoopscopeError, RunNotice, UsageError, counted, listed, short_path, warn
from ..runs import RunFolder, StrategyPlan
from ..sweeps import JobOptions, JobRecord, ProgramJob, read_job, states_of, submit, this_program, visible_devices
from .jobs import COMMAND_PREFIX, THREADS, status_line, task_of
from .options import Options, read_config
from .parser import ONE_OF_SEVERAL, write_line

LOGS = "submitit-jobs"
"""The folder of the jobs' output, within that of the experiment; no strategy has this name."""
POLL_INTERVAL = 0.5  # seconds between two looks at local jobs
YAML = (".yaml", ".yml")


def job_options(options: Options) -> JobOptions:
    """Return the options of the jobs from the words of ``--on-options``, or from the YAML file that they name."""
    words = options["on_options"]
    is_file = len(words) == 1 and words[0].endswith(YAML)
    return JobOptions.of(options["on"], read_config(Path(words[0])) if is_file else words)


def train_as_jobs(plans: Sequence[StrategyPlan], options: Options, mode: Mode, compared_to: Mapping[str, str]) -> None:
    """Submit the planned runs that are neither completed nor in a job, and wait for local ones.

    Raises:
        LoopscopeError: if local jobs have ended without completing their runs.
        UsageError: for bad options, and if the state of an earlier job is not known.
    """
    wanted = job_options(options)
    planned = {plan.folder.path: plan for plan in plans if plan.summary is None}
    running = _jobs_in_progress([*planned], overwrite=options["overwrite"])
    logs = _experiment_folder(plans[0].folder) / LOGS
    executor = wanted.executor(logs, plans[0].record.experiment, options["jobs"])
    environment = visible_devices() if wanted.is_local and "gpus_per_node" not in wanted.resources else {}
    jobs = [
        ProgramJob(this_program(), *_words(plan, options), folder, environment)
        for folder, plan in planned.items()
        if folder not in running
    ]
    done = len(plans) - len(planned)
    if not wanted.is_local:
        records = submit(executor, jobs) if jobs else []
        _announce(records, running, done, logs, plans[0])
        return
    at_once = max(1, min(options["jobs"] or 1, len(jobs)))
    if jobs and THREADS not in os.environ:
        os.environ[THREADS] = str(max(1, torch.get_num_threads() // at_once))
        sentence = (
            f"{counted(at_once, 'job')} at a time share the processor: {THREADS} is {os.environ[THREADS]} for each."
        )
        warn(sentence, RunNotice, stacklevel=1)
    local = LocalJobs(executor, jobs, {folder: planned[folder].folder for folder in planned}, running, at_once)
    _wait(local, plans, mode, compared_to)


@dataclass
class LocalJobs:
    """Jobs on this machine, of which this command starts a few at a time."""

    executor: Any
    waiting: list[ProgramJob]
    folders: Mapping[Path, RunFolder]
    running: dict[Path, JobRecord]
    at_once: int

    def ended(self, line: RunsLine) -> Iterator[tuple[RunFolder, JobRecord]]:
        """Start the jobs, show them in a line, and yield each when it has ended."""
        while self.waiting or self.running:
            while self.waiting and len(self.running) < self.at_once:
                job = self.waiting.pop(0)
                (self.running[job.folder],) = submit(self.executor, [job])
            states = states_of(self.running.values())
            line.running = {self.folders[folder].name: f"job {record.id}" for folder, record in self.running.items()}
            line.show()
            for folder, record in [*self.running.items()]:
                if states[record.id] == "ended" and not is_locked(folder):
                    del self.running[folder]
                    yield self.folders[folder], record
            time.sleep(POLL_INTERVAL if self.running else 0.0)


def _wait(local: LocalJobs, plans: Sequence[StrategyPlan], mode: Mode, compared_to: Mapping[str, str]) -> None:
    """Show the runs as they end; raise :class:`LoopscopeError` with those that are not complete."""
    display = RunConsole("normal" if mode == "live" else mode, compared_to=compared_to)
    line = status_line(display, len(local.folders), mode)
    summaries = {plan.folder.name: plan.summary for plan in plans}
    problems = []
    with display, closing(line):
        for folder, job in local.ended(line):
            summary = summaries[folder.name] = folder.completed()
            if summary is None:
                problems.append(f"{folder.name}, in {short_path(folder.path)}: {_reason(job)}.")
            else:
                line.done += 1
                display.strategy_ended({**summary, "hook_tables": {}, "sample": None})
        if completed := [summary for summary in summaries.values() if summary is not None]:
            display.ended(completed)
    if problems:
        raise LoopscopeError(
            f"{len(problems)} of {counted(len(plans), 'run')} did not complete; the same command resumes them. "
            f"{' '.join(problems)}"
        )


def _reason(job: JobRecord) -> str:
    """Return the last sentence of loopscope in the output of a job that has failed, and where that output is."""
    log = job.log("err")
    lines = [line for _, line in read_lines(log)] if log.is_file() else []
    sentences = [line.decode(errors="replace").strip() for line in lines if line.startswith(COMMAND_PREFIX.encode())]
    reason = sentences[-1].removeprefix(COMMAND_PREFIX).rstrip(".") if sentences else f"job {job.id} was killed"
    return f"{reason} ({short_path(log)})"


def _experiment_folder(folder: RunFolder) -> Path:
    """Return the folder above that of the strategy, which may be above that of the seed."""
    return folder.path.parents[0 if folder.path.name == folder.strategy else 1]


def _words(plan: StrategyPlan, options: Options) -> tuple[list[str], list[str]]:
    """Return the words with which the program trains a run, and those with which it resumes the run."""
    alone = {**options, "on": None, "on_options": [], "jobs": None, "live": False, "resume": not options["overwrite"]}
    again = {**alone, "resume": True, "overwrite": False}
    first, second = ([ONE_OF_SEVERAL, json.dumps(task_of(plan, given))] for given in (alone, again))
    return first, second


def _jobs_in_progress(folders: Sequence[Path], *, overwrite: bool) -> dict[Path, JobRecord]:
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


def _announce(
    records: Sequence[JobRecord], running: Mapping[Path, JobRecord], done: int, logs: Path, plan: StrategyPlan
) -> None:
    """Report what was submitted, and how to follow it."""
    if records:
        ids = records[0].id if len(records) == 1 else f"{records[0].id} to {records[-1].id}"
        write_line(f"Submitted {counted(len(records), 'job')} to slurm: {ids}; output in {short_path(logs)}.")
    if running:
        write_line(f"{counted(len(running), 'run')} already in a job: {listed([job.id for job in running.values()])}.")
    if done:
        write_line(f"{counted(done, 'run')} already completed.")
    folder = short_path(logs.parent)
    write_line(f"The same command resumes what has not completed. To watch: loopscope ls {folder} --watch")
