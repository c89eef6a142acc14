"""W&B client in a separate process: follows a JSONL record and sends every line.

The file runs as a script, without loopscope on its path and without torch, so that it starts quickly. Its argument is
the path of its :class:`WandbTask`. It receives an :class:`Ending` on standard input when the run ends; end-of-file
without one means that the run was killed. Its last output is one sentence: the location of the W&B run, or the problem.
"""

import fcntl
import json
import math
import os
import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PAUSE = 0.3  # seconds between two reads of the record
GAVE_UP = 3
LONGEST_TAG = 64
WIDTH = 20  # digits and spaces of a row count, which is overwritten in place


@dataclass(frozen=True)
class Ending:
    """The status of a run, and the size of its record in bytes at its end; ``None`` for the present size."""

    status: str
    size: int | None = None


def new_run_id() -> str:
    """Return an id for a new W&B run, from the operating system instead of the run's random generators."""
    return os.environ.get("WANDB_RUN_ID") or os.urandom(8).hex()


@dataclass(frozen=True)
class WandbTask:
    """The record to send, and the description of the W&B run."""

    record: str  # path of the JSONL file
    folder: str  # the folder of W&B's files
    project: str
    experiment: str
    strategy: str
    config: Mapping[str, Any]
    treatments: Mapping[str, Sequence[str]]
    step_points: Sequence[str]  # names of the hook points whose metrics are series
    patience: float | None  # seconds that the client may take after the end of the run; None for no limit
    pid: int = field(default_factory=os.getpid)  # the process that trains
    run_id: str = field(default_factory=new_run_id)  # the id of the W&B run
    resumed: bool = False  # rows of the record may have been sent before, under the same run_id


class RecordReplacedError(Exception):
    """The record became shorter, so another run has overwritten it."""


class Listener:
    """Waits in a thread for the end of the run; after it the client has ``patience`` seconds left."""

    def __init__(self, stdin: Any, patience: float | None) -> None:
        self.ending = Ending("killed")
        self._over = threading.Event()
        self.wait = self._over.wait  # waits up to N seconds for the end of the run; returns whether it has ended
        threading.Thread(target=self._listen, args=(stdin, patience), daemon=True).start()

    def _listen(self, stdin: Any, patience: float | None) -> None:
        line = stdin.readline()
        if line.endswith("\n"):
            self.ending = Ending(**json.loads(line))
        self._over.set()
        if patience is not None:
            time.sleep(patience)
            _report(f"W&B took more than {patience:g} s after the end of the run.")
            os._exit(GAVE_UP)  # a normal exit would wait for W&B's threads


def records(path: Path, listener: Listener) -> Iterator[dict[str, Any]]:
    """Yield the objects of a JSONL file while it is written, until the run ends; a truncated line is skipped."""
    rest = b""
    with path.open("rb") as file:
        while True:
            over = listener.wait(0)
            size = listener.ending.size if over else None
            data = file.read(1 << 20 if size is None else max(0, min(1 << 20, size - file.tell())))
            if os.fstat(file.fileno()).st_size < file.tell():
                raise RecordReplacedError(f"{path} was overwritten by another run.")
            if data:
                *lines, rest = (rest + data).split(b"\n")
                yield from map(json.loads, lines)
            elif over:
                return
            else:
                listener.wait(PAUSE)


def rows(record: Mapping[str, Any], step_points: Sequence[str], histogram: Callable[[list[float]], Any]) -> Any:
    """Convert one line of the record to rows of W&B's history, ordered by step.

    A value goes to the row of the line's step. Each value of a series goes to the row of its step, and the row of the
    line's step gets ``metric/mean`` and ``metric/histogram`` of the series.
    """
    epoch, step, point = record["epoch"], record["step"], record["hook_point"]
    by_step: dict[int, dict[str, Any]] = {}
    for name, value in record.items():
        if name in ("epoch", "step", "hook_point"):
            continue
        if point in step_points and isinstance(value, dict) and value.keys() == {"steps", "values"}:
            for value_step, item in zip(value["steps"], value["values"], strict=True):
                by_step.setdefault(value_step, {}).update(cells(name, item, histogram))
            by_step.setdefault(step, {}).update(summary(name, value["values"], histogram))
        else:
            by_step.setdefault(step, {}).update(cells(name, value, histogram))
    return [{"step": value_step, "epoch": epoch, **row} for value_step, row in sorted(by_step.items())]


def cells(name: str, value: Any, histogram: Callable[[list[float]], Any]) -> dict[str, Any]:
    """Return a value as cells of a row, named ``name``, or ``name/key`` or ``name/index`` for nested values.

    Integers beyond 64 bits become floats, since W&B cannot store them.

    >>> cells("h/m", {"a": True, "b": [0.5, float("inf")], "c": None}, list)
    {'h/m/a': 1, 'h/m/b': [0.5], 'h/m/b/non_finite': 1}
    """
    if isinstance(value, int):  # a boolean, too
        return {name: int(value) if -(2**63) <= value < 2**63 else as_float(value)}
    if not isinstance(value, (dict, list)):
        return {} if value is None else {name: value}
    if isinstance(value, list) and all(isinstance(item, (int, float)) for item in value):
        return distribution(name, value, histogram)
    items = value.items() if isinstance(value, dict) else enumerate(value)
    return {key: cell for part, item in items for key, cell in cells(f"{name}/{part}", item, histogram).items()}


def distribution(name: str, values: Sequence[float], histogram: Callable[[list[float]], Any]) -> dict[str, Any]:
    """Return the histogram of the finite numbers, and the number of other values."""
    finite = [number for number in map(as_float, values) if math.isfinite(number)]
    others = len(values) - len(finite)
    return ({name: histogram(finite)} if finite else {}) | ({f"{name}/non_finite": others} if others else {})


def summary(name: str, values: Sequence[Any], histogram: Callable[[list[float]], Any]) -> dict[str, Any]:
    """Return mean and histogram of a series; a non-finite number makes the mean non-finite.

    >>> summary("h/m", [1, 2.0], list)
    {'h/m/mean': 1.5, 'h/m/histogram': [1.0, 2.0]}
    """
    numbers = [as_float(value) for value in values if isinstance(value, (int, float))]
    mean = {f"{name}/mean": sum(numbers) / len(numbers)} if numbers else {}
    return mean | distribution(f"{name}/histogram", numbers, histogram)


def as_float(value: float) -> float:
    """Convert a number to a float; integers that are too large become infinite.

    >>> as_float(-(10**400)), as_float(True)
    (-inf, 1.0)
    """
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def start_wandb_run(wandb: Any, **options: Any) -> Any:
    """Start a W&B run; it is offline if there is no login and WANDB_MODE is not set."""
    try:
        return wandb.init(**options)
    except wandb.UsageError:  # raised at once, since there is no terminal on which to ask for a key
        if "WANDB_MODE" in os.environ:
            raise
        return wandb.init(**options, mode="offline")


@contextmanager
def exclusive_run(task: WandbTask) -> Iterator[Any]:
    """Lock the W&B run against other clients, waiting for an earlier one, and yield the file of its row count.

    The file contains the number of rows that the clients have given to W&B.
    """
    path = Path(task.folder) / "wandb" / f"{task.run_id}.rows"
    path.touch()
    # The client of a killed run keeps sending the recorded rows, possibly while the run is resumed.
    with path.open("r+") as note:
        fcntl.flock(note, fcntl.LOCK_EX)
        yield note


def sent_row_count(task: WandbTask, run: Any, note: Any) -> int:
    """Return the number of rows that W&B has of a run: from the server, or offline from the note."""
    if not task.resumed:
        return 0
    return int(note.read() or 0) if run.offline else int(run.starting_step)


def send(task: WandbTask, listener: Listener, note: Any) -> str:
    """Send the rows of the record that W&B does not have yet, and return a sentence with their location."""
    import numpy as np
    import wandb

    def histogram(values: list[float]) -> Any:
        try:
            return wandb.Histogram(values)
        except ValueError:  # the values are too close or too far apart for bins of equal width
            return wandb.Histogram(np_histogram=(np.array([len(values)]), np.array([min(values), max(values)])))

    run = start_wandb_run(
        wandb,
        id=task.run_id,
        resume="allow" if task.resumed else None,
        project=task.project,
        group=task.experiment,
        name=task.strategy,
        job_type=task.strategy,
        tags=[f"treatment:{name}"[:LONGEST_TAG] for name in task.treatments],
        config={
            **task.config,
            "experiment": task.experiment,
            "strategy": task.strategy,
            "treatments": {name: list(parts) for name, parts in task.treatments.items()},
        },
        dir=task.folder,
        settings=wandb.Settings(console="off", silent=True, disable_code=True, x_stats_pid=task.pid),
    )
    run.define_metric("step")
    run.define_metric("*", step_metric="step")
    # A resumed run writes the same lines again, so W&B has the first rows of its record.
    begin, end = sent_row_count(task, run, note), 0
    for record in records(Path(task.record), listener):
        for row in rows(record, task.step_points, histogram):
            if end >= begin:
                run.log(row, step=end if task.resumed else None, commit=True)
            end += 1
        note.seek(0)
        note.write(f"{max(begin, end):{WIDTH}}")
        note.flush()
    status = listener.ending.status
    run.summary["status"] = status
    run.finish(exit_code=0 if status == "completed" else 1)
    return outcome_of(task, run)


def outcome_of(task: WandbTask, run: Any) -> str:
    """Return a sentence with the location of the run; offline logs that have been sent are marked as synced."""
    # The names of the folders contain the time, so the oldest log is the first.
    logs = sorted((Path(task.folder) / "wandb").glob(f"offline-run-*-{task.run_id}/run-{task.run_id}.wandb"))
    if not run.offline:
        for path in logs:
            path.with_name(f"{path.name}.synced").touch()
        return f"The W&B run is at {run.url}."
    folders = [str(path.parent) for path in logs if not path.with_name(f"{path.name}.synced").exists()]
    return f"The W&B run was recorded offline; to send it: wandb sync {shlex.join(folders)}"


def _report(sentence: str) -> None:
    with suppress(OSError):  # the reader may have ended
        os.write(1, (" ".join(sentence.split()) + "\n").encode())


def main() -> int:
    """Send the record of the task, and return the exit status."""
    task = WandbTask(**json.loads(Path(sys.argv[1]).read_text("utf-8")))
    listener = Listener(sys.stdin, task.patience)
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    with suppress(OSError):
        os.nice(10)  # training takes precedence
    try:
        with exclusive_run(task) as note:
            outcome = send(task, listener, note)
    except Exception as error:
        _report(f"{type(error).__name__}: {error}")
        raise
    _report(outcome)
    return 0


if __name__ == "__main__":
    sys.exit(main())
