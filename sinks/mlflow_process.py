"""MLflow's part of the client process: the run, its metrics and its location.

The file is loaded by ``client_process.py``, without loopscope on its path. MLflow's environment variables have the
effect that they have without loopscope; an option of the user overrides them.
"""

import hashlib
import os
import re
import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .client_process import ClientTask, Feed

RUN_ID, ROWS = "loopscope.run_id", "loopscope.rows"  # tags: the id of the run, and the number of rows that MLflow has
MOST_METRICS, MOST_TAGS = 900, 90  # of one request; MLflow accepts 1,000 entities, 100 of them tags
LONGEST_KEY, LONGEST_VALUE = 250, 6000
STATUSES = {"completed": "FINISHED", "interrupted": "KILLED", "killed": "KILLED"}


def valid_key(name: str) -> str:
    """Return a name that MLflow accepts: other characters become underscores, and long names are shortened.

    >>> valid_key("h/layers[0].weight"), valid_key("a//b/../c")
    ('h/layers_0_.weight', 'a/_/b/__/c')
    """
    parts = re.sub(r"[^\w\-. :/]", "_", name, flags=re.ASCII).split("/")
    # MLflow refuses parts that a path would not keep.
    key = "/".join(part if part.strip(".") else "_" * max(1, len(part)) for part in parts)
    if len(key) <= LONGEST_KEY:
        return key
    return f"{key[: LONGEST_KEY - 9]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def parameters(options: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """Return options as MLflow's parameters; nested options are named by their path.

    >>> parameters({"lr": 0.1, "adam": {"betas": [0.9, 0.99]}})
    {'lr': '0.1', 'adam.betas': '[0.9, 0.99]'}
    """
    texts: dict[str, str] = {}
    for name, value in options.items():
        if isinstance(value, dict) and value:
            texts |= parameters(value, f"{prefix}{name}.")
        else:
            texts[valid_key(f"{prefix}{name}")] = str(value)[:LONGEST_VALUE]
    return texts


def start_run(mlflow: Any, task: "ClientTask") -> Any:
    """Start the MLflow run, or continue the one that an earlier client started for this run."""
    if task.project is not None:
        mlflow.set_experiment(task.project)
    elif not (os.environ.get("MLFLOW_EXPERIMENT_NAME") or os.environ.get("MLFLOW_EXPERIMENT_ID")):
        mlflow.set_experiment(task.experiment)
    if task.resumed:
        found = mlflow.search_runs(
            filter_string=f"tags.`{RUN_ID}` = '{task.run_id}'", max_results=1, output_format="list"
        )
        if found:
            return mlflow.start_run(run_id=found[0].info.run_id)
    tags = {RUN_ID: task.run_id} | {valid_key(f"treatment:{name}"): "true" for name in task.treatments}
    run = mlflow.start_run(run_name=task.strategy, tags=tags)
    mlflow.log_params(parameters(task.options))
    return run


class Batch:
    """Metrics and texts of rows, which are sent together with the number of rows."""

    def __init__(self, mlflow: Any, run_id: str) -> None:
        self._client, self._run_id = mlflow.MlflowClient(), run_id
        self._entities = mlflow.entities
        self._metrics: list[Any] = []
        self._texts: dict[str, str] = {}

    def add(self, row: dict[str, Any]) -> None:
        """Add the cells of a row."""
        step, now = row["step"], int(time.time() * 1000)
        for name, value in row.items():
            if isinstance(value, (int, float)) and name != "step":
                self._metrics.append(self._entities.Metric(valid_key(name), float(value), now, step))
            elif isinstance(value, str):
                self._texts[valid_key(name)] = value

    @property
    def is_full(self) -> bool:
        """Whether one request could not hold many more rows."""
        return len(self._metrics) >= MOST_METRICS or len(self._texts) >= MOST_TAGS

    def send(self, row_count: int) -> None:
        """Send the rows, the last ones together with the number of rows that MLflow then has."""
        tags = [self._entities.RunTag(name, value[:LONGEST_VALUE]) for name, value in self._texts.items()]
        while len(self._metrics) > MOST_METRICS or len(tags) > MOST_TAGS:
            self._client.log_batch(self._run_id, self._metrics[:MOST_METRICS], tags=tags[:MOST_TAGS])
            del self._metrics[:MOST_METRICS], tags[:MOST_TAGS]
        tags.append(self._entities.RunTag(ROWS, str(row_count)))
        self._client.log_batch(self._run_id, self._metrics, tags=tags)
        self._metrics, self._texts = [], {}


def send(task: "ClientTask", feed: "Feed") -> str:
    """Send the rows of the record that MLflow does not have yet, and return a sentence with their location."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    import mlflow

    sys.argv[0] = task.script  # MLflow stores the name of the program and the commit of its repository
    run = start_run(mlflow, task)
    batch = Batch(mlflow, run.info.run_id)
    # A resumed run writes the same lines again, so MLflow has the first rows of its record.
    begin, end = int(run.data.tags.get(ROWS, 0)), 0
    for chunk in feed.chunks():
        for record in chunk:
            for row in feed.rows(record, None):
                end += 1
                if end > begin:
                    batch.add(row)
                if batch.is_full:
                    batch.send(end)
        if end > begin:
            batch.send(end)
    mlflow.set_tag("loopscope.status", feed.status)
    mlflow.end_run(STATUSES.get(feed.status, "FAILED"))
    return f"The MLflow run {run.info.run_id} is in experiment {run.info.experiment_id} of {mlflow.get_tracking_uri()}."
