"""Trackio's part of the client process: the run, its rows and its location.

The file is loaded by ``client_process.py``, without loopscope on its path. Trackio's environment variables, such as
TRACKIO_DIR and TRACKIO_SPACE_ID, have the effect that they have without loopscope.
"""

import os
import shlex
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .client_process import ClientTask, Feed


def run_name(task: "ClientTask") -> str:
    """Return the name of the run; it contains the id, because Trackio resumes runs by name."""
    return f"{task.strategy}-{task.run_id[:6]}"


def stored_row_count(project: str, run: Any) -> int | None:
    """Return the number of rows in the local store; ``None`` for a remote store or a store in files."""
    from trackio.sqlite_storage import SQLiteStorage
    from trackio.utils import get_storage_mode

    remote = any(os.environ.get(name) for name in ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"))
    if remote or get_storage_mode() != "sqlite":
        return None
    return int(SQLiteStorage.get_log_count(project, run.name, run_id=run.id))


def send(task: "ClientTask", feed: "Feed") -> str:
    """Send the rows of the record that Trackio does not have yet, and return a sentence with their location.

    Raises:
        RuntimeError: if rows are missing in the local store at the end; Trackio only prints such failures.
    """
    import numpy as np
    import trackio

    def histogram(values: list[float]) -> Any:
        try:
            return trackio.Histogram(values)
        except ValueError:  # the values are too close or too far apart for bins of equal width
            return trackio.Histogram(np_histogram=(np.array([len(values)]), np.array([min(values), max(values)])))

    project = task.project or task.experiment
    run: Any = trackio.init(
        project=project,
        name=run_name(task),
        group=task.experiment,
        config={name.lstrip("_"): value for name, value in task.options.items()},
        resume="allow" if task.resumed else "never",
        embed=False,
    )
    # A resumed run writes the same lines again, so Trackio has the first rows of its record.
    begin, end, step = 0, 0, 0
    if task.resumed:
        stored = stored_row_count(project, run)
        begin = feed.noted_count() if stored is None else stored
    for chunk in feed.chunks():
        for record in chunk:
            for row in feed.rows(record, histogram):
                step = row.pop("step")  # a column of Trackio
                if end >= begin:
                    run.log(row, step=step)
                end += 1
            feed.note_count(max(begin, end))
    if feed.status != "completed":
        run.alert(f"The run {feed.status}.", level=trackio.AlertLevel.ERROR, step=step)
    run.finish()
    stored = stored_row_count(project, run)
    if stored is not None and stored < end:
        raise RuntimeError(f"Trackio stored {stored} of {end} rows.")
    return (
        f"The Trackio run {run.name} is in project {project}; to view it: trackio show --project {shlex.quote(project)}"
    )
