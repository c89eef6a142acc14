"""Records of jobs, one in the folder of each run, and the states of these jobs.

The commands that read runs use this module, so it imports neither torch nor submitit.
"""

import os
import socket
import subprocess
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Literal

from ..durable_files import path_exists, read_json, write_json
from ..errors import UsageError
from ..runs import CONFIG, checked_fields

JOB = "job.json"
PENDING, RUNNING, ENDED, UNKNOWN = "pending", "running", "ended", "unknown"
QUEUED = {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "RESV_DEL_HOLD", "SPECIAL_EXIT"}
"""The states of SLURM in which a job waits; a job that squeue no longer lists has ended."""
OVER = {
    "COMPLETED",
    "CANCELLED",
    "FAILED",
    "TIMEOUT",
    "NODE_FAIL",
    "PREEMPTED",
    "BOOT_FAIL",
    "DEADLINE",
    "OUT_OF_MEMORY",
}
"""The states in which squeue still lists a job for some minutes."""
State = Literal["pending", "running", "ended", "unknown"]


@dataclass(frozen=True)
class JobRecord:
    """The job that trains a run.

    Args:
        id: the identifier of the scheduler; of a local job its process.
        cluster: ``slurm`` or ``local``.
        host: the machine that submitted the job.
        logs: the folder of what the job prints.
        started: whether the job has started, perhaps before it was requeued.
    """

    id: str
    cluster: str
    host: str
    logs: str
    started: bool = False

    @classmethod
    def of_submission(cls, number: str, cluster: str, logs: Path) -> "JobRecord":
        """Return the record of a job that this machine has submitted."""
        return cls(number, cluster, socket.gethostname(), str(logs))

    def write(self, folder: Path) -> None:
        """Write the record into the folder of a run."""
        write_json(folder / JOB, asdict(self))

    def log(self, stream: Literal["out", "err"] = "out") -> Path:
        """Return the file of what the job prints."""
        return Path(self.logs) / f"{self.id}_0_log.{stream}"


def read_job(folder: Path) -> JobRecord | None:
    """Return the job that trains the run in a folder; ``None`` without a readable record."""
    path = folder / JOB
    with suppress(UsageError):
        if path_exists(path):
            types = {"id": str, "cluster": str, "host": str, "logs": str, "started": bool}
            content = checked_fields(read_json(path), types, path)
            return JobRecord(**{item.name: content[item.name] for item in fields(JobRecord)})
    return None


def submitted_jobs(folder: Path) -> dict[Path, JobRecord]:
    """Return the jobs of the runs in a folder and its subfolders, by the folder of the run; links are not followed."""
    jobs = {}
    pending = [str(folder)]
    while pending:
        here = pending.pop()
        entries = []
        with suppress(OSError):  # find_runs reports it
            entries = list(os.scandir(here))
        names = {entry.name for entry in entries}
        if JOB in names and (job := read_job(Path(here))) is not None:
            jobs[Path(here)] = job
        elif CONFIG not in names:
            pending += [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
    return jobs


def states_of(jobs: Iterable[JobRecord]) -> dict[str, State]:
    """Return the states of jobs by their identifiers; ``unknown`` if the scheduler does not answer."""
    all_jobs = list(jobs)
    queue = _queue() if any(job.cluster == "slurm" for job in all_jobs) else {}
    return {job.id: _state_in_queue(job, queue) if job.cluster == "slurm" else _local_state(job) for job in all_jobs}


def _queue() -> Mapping[str, str] | None:
    """Return the state of each job of this user in the queue of SLURM; ``None`` if it does not answer."""
    # Not by sacct, as submitit does: many small clusters keep no accounts.
    command = ["squeue", "--me", "--noheader", "--array", "--states=all", "--format=%i %T"]
    try:
        listing = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    pairs = (line.split() for line in listing.splitlines() if line.strip())
    return {number: state for number, state, *_ in pairs}


def _state_in_queue(job: JobRecord, queue: Mapping[str, str] | None) -> State:
    if queue is None:
        return "unknown"
    state = queue.get(job.id)
    if state is None or state in OVER:
        return "ended"
    return "pending" if state in QUEUED else "running"


def _local_state(job: JobRecord) -> State:
    """Return whether the process of a local job exists; the number of an ended one may belong to another program."""
    if job.host != socket.gethostname():
        return "unknown"
    try:
        os.kill(int(job.id), 0)
    except (OSError, ValueError):
        return "ended"
    with suppress(OSError):  # systems without /proc
        command = Path(f"/proc/{job.id}/cmdline").read_bytes()
        if not command:  # of a process that has ended, and of one that is just starting its program
            state = Path(f"/proc/{job.id}/stat").read_text().rpartition(")")[2].split()[0]
            return "ended" if state == "Z" else "running"
        return "running" if job.logs.encode() in command.split(b"\0") else "ended"
    return "running"
