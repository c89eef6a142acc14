"""Options of jobs, and their submission by submitit."""

import json
import math
import os
import re
import shutil
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from operator import mul
from pathlib import Path
from typing import Any

from ..durable_files import translated_disk_errors
from ..errors import LoopscopeError, UsageError, notice, require, unknown
from ..optional_packages import extra_command
from .command_job import CommandJob
from .job import ProgramJob
from .job_records import JOB, JobRecord

CLUSTERS = ("slurm", "local")
SLURM_MINUTES, LOCAL_MINUTES = 60, 30 * 24 * 60
"""Time limits of a job by default; at its limit a job is requeued."""
MOST_REQUEUES = 10_000
DEVICES = "CUDA_VISIBLE_DEVICES"
OF_SLURM = ("partition", "account", "qos", "constraint", "mem", "cpus")
"""Options without a meaning on this machine."""
DAY, UNITS = 24 * 60, (60, 1, 1 / 60)
"""Minutes of a day, and of an hour, a minute and a second."""


def require_submitit() -> None:
    """Raise :class:`UsageError` with the command that installs submitit, if it is missing."""
    try:
        import submitit  # noqa: F401
    except ImportError as error:
        raise UsageError(
            f"--on needs the package submitit, which is not installed: {extra_command('slurm')}."
        ) from error


@dataclass(frozen=True)
class JobOptions:
    """The cluster, and the resources of each job, as options of submitit."""

    cluster: str
    resources: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, cluster: str, assignments: Sequence[str] | Mapping[str, Any]) -> "JobOptions":
        """Return the options of ``name=value`` words, or of a mapping.

        >>> JobOptions.of("slurm", ["partition=gpu", "gpus=1", "mem=16G", "time=2:00:00"]).resources
        {'slurm_partition': 'gpu', 'gpus_per_node': 1, 'mem_gb': 16.0, 'timeout_min': 120}

        Raises:
            UsageError: for an unknown option, or a value that it does not take.
        """
        given = dict(assignments if isinstance(assignments, Mapping) else map(_assignment, assignments))
        for name in given:
            if name not in READERS:
                raise unknown("option of --on-options:", str(name), READERS)
        values = {name: READERS[name](name, str(value)) for name, value in given.items()}
        cluster = values.pop("cluster", cluster)
        if cluster == "local" and (idle := [name for name in OF_SLURM if name in values]):
            notice(f"Jobs on this machine have no {', '.join(idle)}: --on-options {' '.join(idle)} has no effect here.")
        return cls(cluster, {SUBMITIT_NAMES[name]: value for name, value in values.items()})

    @property
    def is_local(self) -> bool:
        """Whether the jobs are processes of this machine."""
        return self.cluster == "local"

    def variables(self) -> dict[str, str | None]:
        """Return variables of the jobs: submitit hides all GPUs from local jobs, unless they ask for some."""
        inherits = self.is_local and "gpus_per_node" not in self.resources
        return {DEVICES: os.environ.get(DEVICES)} if inherits else {}

    def executor(self, folder: Path, name: str, at_once: int | None) -> Any:
        """Return the executor of submitit, with logs in a folder.

        Raises:
            UsageError: if this machine has no SLURM, or submitit refuses the options.
        """
        import submitit

        require(
            self.is_local or shutil.which("sbatch") is not None,
            "--on slurm needs the commands of SLURM, and this machine has no sbatch; start it where they are "
            "installed, or try the jobs on this machine: --on local.",
        )
        limits = {f"{cluster}_max_num_timeout": MOST_REQUEUES for cluster in CLUSTERS}
        defaults: dict[str, Any] = {"name": name, "timeout_min": LOCAL_MINUTES if self.is_local else SLURM_MINUTES}
        parallelism = {} if at_once is None else {"slurm_array_parallelism": at_once}
        try:
            executor = submitit.AutoExecutor(folder, cluster=self.cluster, **limits)
            executor.update_parameters(**defaults | parallelism | self.resources)
        except (ValueError, NameError, AssertionError, RuntimeError) as error:
            raise UsageError(f"submitit refused the options of the jobs: {error}") from error
        return executor


def submit(executor: Any, jobs: Sequence[ProgramJob | CommandJob]) -> list[JobRecord]:
    """Submit jobs, as one array if the scheduler has arrays, and return their records, which are in the folders too.

    Raises:
        LoopscopeError: if the scheduler refuses them.
    """
    for job in jobs:
        with translated_disk_errors(job.folder):
            job.folder.mkdir(parents=True, exist_ok=True)
            (job.folder / JOB).unlink(missing_ok=True)
    try:
        with _outliving(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # such as those of submitit about its own options
            submitted = executor.submit_array(jobs)
    except Exception as error:
        raise LoopscopeError(f"The jobs could not be submitted: {' '.join(str(error).split())}") from error
    records = []
    for job, item in zip(jobs, submitted, strict=True):
        record = JobRecord.of_submission(item.job_id, executor.cluster, executor.folder)
        records.append(record)
        # A job that starts replaces the file, also one that is being written here; it never reads a half as a whole.
        with suppress(FileExistsError), (job.folder / JOB).open("x", encoding="utf-8") as file:
            json.dump(asdict(record), file)
    return records


@contextmanager
def _outliving() -> Iterator[None]:
    """Let the processes that start in the body ignore Ctrl-C and the end of the terminal, which are for the command."""
    earlier = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)


def this_program() -> list[str]:
    """Return the words after ``python`` that select the program of this process, if it is one of ``loopscope``."""
    is_command = sys.argv[1:2] in (["run"], ["resume"])  # otherwise another program called main()
    words = sys.orig_argv[1 : len(sys.orig_argv) - len(sys.argv) + 1] if is_command else []
    return (
        [*words[:-1], os.path.abspath(words[-1])] if words and words[-2:-1] != ["-m"] else words or ["-m", "loopscope"]
    )


def _assignment(word: str) -> tuple[str, str]:
    name, equals, value = word.partition("=")
    require(bool(name and equals and value), f"--on-options takes NAME=VALUE, such as gpus=1, but got {word!r}.")
    return name, value


def _whole_number(name: str, value: str) -> int:
    require(value.isdigit(), f"--on-options {name}={value} must be a whole number, such as {name}=1.")
    return int(value)


def _gigabytes(name: str, value: str) -> float:
    match = re.fullmatch(r"(?P<number>\d+(\.\d+)?)(?P<unit>[MGT])B?", value.upper())
    require(match is not None, f"--on-options {name}={value} must be a number with M, G or T, such as {name}=16G.")
    assert match is not None
    return float(match["number"]) * {"M": 1 / 1024, "G": 1.0, "T": 1024.0}[match["unit"]]


def _minutes(name: str, value: str) -> int:
    """Return minutes, rounded up, from a time as SLURM reads it: M, M:S, H:M:S, D-H, D-H:M or D-H:M:S.

    >>> _minutes("time", "90"), _minutes("time", "2:00:00"), _minutes("time", "1-12"), _minutes("time", "1:30")
    (90, 120, 2160, 2)
    """
    days, dash, rest = value.rpartition("-")
    fields = rest.split(":")
    is_time = all(text.isdigit() for text in (days if dash else "0", *fields)) and len(fields) <= 3
    first = 0 if dash or len(fields) == 3 else 1  # otherwise minutes come first
    total = math.ceil(int(days or 0) * DAY + sum(map(mul, map(int, fields), UNITS[first:]))) if is_time else 0
    require(total > 0, f"--on-options {name}={value} must be minutes, or hours as in {name}=2:00:00.")
    return total


def _cluster(name: str, value: str) -> str:
    if value not in CLUSTERS:
        raise unknown("cluster of --on-options:", value, CLUSTERS)
    return value


def _text(name: str, value: str) -> str:
    return value


READERS: Mapping[str, Callable[[str, str], Any]] = {
    "cluster": _cluster,
    "gpus": _whole_number,
    "cpus": _whole_number,
    "mem": _gigabytes,
    "time": _minutes,
    **dict.fromkeys(("partition", "account", "qos", "constraint"), _text),
}
"""What reads the value of each option."""
SUBMITIT_NAMES = {
    **{"gpus": "gpus_per_node", "cpus": "cpus_per_task", "mem": "mem_gb", "time": "timeout_min"},
    **{name: f"slurm_{name}" for name in ("partition", "account", "qos", "constraint")},
}
