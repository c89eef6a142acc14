"""Many runs on a cluster: options of its jobs, their submission, and their states."""

from typing import TYPE_CHECKING

from ..names_on_demand import names_on_demand

if TYPE_CHECKING:
    from .cluster import JobOptions, require_submitit, submit, this_program, visible_devices
    from .job import ProgramJob, job_signals
    from .job_records import JOB, JobRecord, State, read_job, states_of, submitted_jobs
    from .ranges import numbers_of, with_all_seeds
else:
    __getattr__ = names_on_demand(__name__)

__all__ = [
    "JOB", "JobOptions", "JobRecord", "ProgramJob", "State", "job_signals", "numbers_of", "read_job",
    "require_submitit", "states_of", "submit", "submitted_jobs", "this_program", "visible_devices", "with_all_seeds",
]
