"""Many runs on a cluster: options of its jobs, their submission, and their states."""

from typing import TYPE_CHECKING

from ..names_on_demand import names_on_demand

if TYPE_CHECKING:
    from .cluster import JobOptions, require_submitit, submit, this_program
    from .command_job import CommandJob
    from .fisher import associations
    from .grid import point_name, points_of, words_of
    from .job import ProgramJob, job_signals
    from .job_records import JOB, JobRecord, State, read_job, states_of, submitted_jobs
    from .local_jobs import LocalJobs, jobs_in_progress, submission_lines
    from .ranges import numbers_of, with_all_seeds
else:
    __getattr__ = names_on_demand(__name__)

__all__ = [
    "JOB", "CommandJob", "JobOptions", "JobRecord", "LocalJobs", "ProgramJob", "State", "associations", "job_signals",
    "jobs_in_progress", "numbers_of", "point_name", "points_of", "read_job", "require_submitit",
    "states_of", "submission_lines", "submit", "submitted_jobs", "this_program", "with_all_seeds", "words_of",
]
