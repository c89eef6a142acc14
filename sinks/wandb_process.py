"""W&B's part of the client process: the run, its rows and its location.

The file is loaded by ``client_process.py``, without loopscope on its path. W&B's environment variables have the effect
that they have without loopscope; an option of the user overrides them.
"""

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .client_process import ClientTask, Feed

LONGEST_TAG = 64


def start_wandb_run(wandb: Any, **options: Any) -> Any:
    """Start a W&B run; it is offline if there is no login and WANDB_MODE is not set."""
    try:
        return wandb.init(**options)
    except wandb.UsageError:  # raised at once, since there is no terminal on which to ask for a key
        if "WANDB_MODE" in os.environ:
            raise
        return wandb.init(**options, mode="offline")


def description(task: "ClientTask") -> dict[str, Any]:
    """Return arguments of ``wandb.init``, without those that an environment variable gives."""
    defaults = {
        "WANDB_PROJECT": ("project", task.experiment),
        "WANDB_RUN_GROUP": ("group", task.experiment),
        "WANDB_NAME": ("name", task.strategy),
        "WANDB_JOB_TYPE": ("job_type", task.strategy),
        "WANDB_DIR": ("dir", task.folder),
    }
    arguments: dict[str, Any] = {
        argument: value for variable, (argument, value) in defaults.items() if not os.environ.get(variable)
    }
    if task.project is not None:
        arguments["project"] = task.project
    # An argument replaces the tags of the variable.
    tags = [tag.strip() for tag in os.environ.get("WANDB_TAGS", "").split(",")]
    tags += [f"treatment:{name}"[:LONGEST_TAG] for name in task.treatments]
    return {**arguments, "tags": [tag for tag in tags if tag] or None}


def sent_row_count(task: "ClientTask", run: Any, feed: "Feed") -> int:
    """Return the number of rows that W&B has of a run: from the server, or offline from the note."""
    if not task.resumed:
        return 0
    return feed.noted_count() if run.offline else int(run.starting_step)


def send(task: "ClientTask", feed: "Feed") -> str:
    """Send the rows of the record that W&B does not have yet, and return a sentence with their location."""
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    import numpy as np
    import wandb

    def histogram(values: list[float]) -> Any:
        try:
            return wandb.Histogram(values)
        except ValueError:  # the values are too close or too far apart for bins of equal width
            return wandb.Histogram(np_histogram=(np.array([len(values)]), np.array([min(values), max(values)])))

    run = start_wandb_run(
        wandb,
        **description(task),
        id=task.run_id,
        resume="allow" if task.resumed else None,
        config=task.options,
        settings=wandb.Settings(console="off", silent=True, disable_code=True, x_stats_pid=task.pid),
    )
    run.define_metric("step")
    run.define_metric("*", step_metric="step")
    # A resumed run writes the same lines again, so W&B has the first rows of its record.
    begin, end = sent_row_count(task, run, feed), 0
    for chunk in feed.chunks():
        for record in chunk:
            for row in feed.rows(record, histogram):
                if end >= begin:
                    run.log(row, step=end if task.resumed else None, commit=True)
                end += 1
            feed.note_count(max(begin, end))
    run.summary["status"] = feed.status
    run.finish(exit_code=0 if feed.status == "completed" else 1)
    return outcome_of(task, run)


def outcome_of(task: "ClientTask", run: Any) -> str:
    """Return a sentence with the location of the run; offline logs that have been sent are marked as synced."""
    folder = Path(os.environ.get("WANDB_DIR") or task.folder) / "wandb"
    # The names of the folders contain the time, so the oldest log is the first.
    logs = sorted(folder.glob(f"offline-run-*-{task.run_id}/run-{task.run_id}.wandb"))
    if not run.offline:
        for path in logs:
            path.with_name(f"{path.name}.synced").touch()
        return f"The W&B run is at {run.url}."
    folders = [str(path.parent) for path in logs if not path.with_name(f"{path.name}.synced").exists()]
    return f"The W&B run was recorded offline; to send it: wandb sync {shlex.join(folders)}"
