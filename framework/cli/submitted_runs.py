"""The option ``--on``: runs as jobs of a cluster, or as jobs on this machine that outlive the command."""

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path

import torch

from ..console import Mode, RunConsole
from ..durable_files import read_lines
from ..errors import LoopscopeError, RunNotice, counted, short_path, warn
from ..runs import RunFolder, StrategyPlan
from ..sweeps import (
    JobOptions,
    JobRecord,
    LocalJobs,
    ProgramJob,
    jobs_in_progress,
    submission_lines,
    submit,
    this_program,
)
from .jobs import COMMAND_PREFIX, THREADS, status_line, task_of
from .options import Options, read_config
from .parser import ONE_OF_SEVERAL, write_lines

LOGS = "submitit-jobs"
"""The folder of the jobs' output, within that of the experiment; no strategy has this name."""
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
    running = jobs_in_progress([*planned], overwrite=options["overwrite"])
    logs = _experiment_folder(plans[0].folder) / LOGS
    executor = wanted.executor(logs, plans[0].record.experiment, options["jobs"])
    jobs = [
        ProgramJob(this_program(), *_words(plan, options), folder, wanted.variables())
        for folder, plan in planned.items()
        if folder not in running
    ]
    if not wanted.is_local:
        records = submit(executor, jobs) if jobs else []
        write_lines(*submission_lines(records, running, len(plans) - len(planned), logs.parent))
        return
    at_once = max(1, min(options["jobs"] or 1, len(jobs)))
    if jobs and THREADS not in os.environ:
        os.environ[THREADS] = str(max(1, torch.get_num_threads() // at_once))
        sentence = (
            f"{counted(at_once, 'job')} at a time share the processor: {THREADS} is {os.environ[THREADS]} for each."
        )
        warn(sentence, RunNotice, stacklevel=1)
    _wait(LocalJobs(executor, [*jobs], running, at_once), plans, mode, compared_to)


def _wait(local: LocalJobs, plans: Sequence[StrategyPlan], mode: Mode, compared_to: Mapping[str, str]) -> None:
    """Show the runs as they end; raise :class:`LoopscopeError` with those that are not complete."""
    display = RunConsole("normal" if mode == "live" else mode, compared_to=compared_to)
    summaries = {plan.folder.name: plan.summary for plan in plans}
    line = status_line(display, [*summaries.values()].count(None), mode)
    folders = {plan.folder.path: plan.folder for plan in plans}
    problems = []

    def show(running: Mapping[Path, JobRecord]) -> None:
        line.running = {folders[path].name: f"job {record.id}" for path, record in running.items()}
        line.show()

    with display, closing(line):
        for path, job in local.ended(show):
            folder = folders[path]
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
