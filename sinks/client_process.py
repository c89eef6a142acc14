"""Client of a tracking service in a separate process: follows a JSONL record and passes on every row.

The file runs as a script, without loopscope on its path and without torch, so that it starts quickly. Its argument is
the path of its :class:`ClientTask`, which names the file of a service, such as ``wandb_process.py``, with a function
``send(task, feed)``. The process receives an :class:`Ending` on standard input when the run ends; end-of-file without
one means that the run was killed. Its output is one sentence: the location of the service's run, or the problem.
"""

import fcntl
import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

PAUSE = 0.3  # seconds between two reads of the record
GAVE_UP = 3
WIDTH = 20  # digits and spaces of a row count, which is overwritten in place
CHUNK = 1 << 20  # bytes of the record that are read at once
Histogram = Callable[[list[float]], Any]


@dataclass(frozen=True)
class Ending:
    """The status of a run, and the size of its record in bytes at its end; ``None`` for the present size."""

    status: str
    size: int | None = None


def new_run_id() -> str:
    """Return an id for a new run of a service, from the operating system instead of the run's random generators."""
    return os.urandom(8).hex()


@dataclass(frozen=True)
class ClientTask:
    """The record to send, and the description of the service's run."""

    record: str  # path of the JSONL file
    folder: str  # the folder of the run
    project: str | None  # the user's choice of a project
    experiment: str
    strategy: str
    config: Mapping[str, Any]
    treatments: Mapping[str, Sequence[str]]
    step_points: Sequence[str]  # names of the hook points whose metrics are series
    patience: float | None  # seconds that the client may take after the end of the run; None for no limit
    pid: int = field(default_factory=os.getpid)  # the process that trains
    script: str = field(default_factory=lambda: sys.argv[0])  # the program that trains
    run_id: str = field(default_factory=new_run_id)  # the id of the service's run
    resumed: bool = False  # rows of the record may have been sent before, under the same run_id
    program: str = ""  # path of the file with the function ``send``
    service: str = "wandb"  # name of the service, and of the folder for its files
    title: str = "W&B"  # name of the service in messages

    @property
    def files(self) -> Path:
        """The folder for the files of the service."""
        return Path(self.folder) / self.service

    @property
    def options(self) -> dict[str, Any]:
        """The configuration of the experiment with the experiment, the strategy and the treatments."""
        treatments = {name: list(parts) for name, parts in self.treatments.items()}
        return {
            **self.config, "experiment": self.experiment, "strategy": self.strategy, "treatments": treatments
        }  # fmt: skip


class RecordReplacedError(Exception):
    """The record became shorter, so another run has overwritten it."""


class EndListener:
    """Waits in a thread for the end of the run; after it the client has ``patience`` seconds left."""

    def __init__(self, stdin: Any, patience: float | None, title: str) -> None:
        self.ending = Ending("killed")
        self._over = threading.Event()
        self._title = title
        self.wait = self._over.wait  # waits up to N seconds for the end of the run; returns whether it has ended
        threading.Thread(target=self._listen, args=(stdin, patience), daemon=True).start()

    def _listen(self, stdin: Any, patience: float | None) -> None:
        line = stdin.readline()
        if line.endswith("\n"):
            self.ending = Ending(**json.loads(line))
        self._over.set()
        if patience is not None:
            time.sleep(patience)
            report(f"{self._title} took more than {patience:g} s after the end of the run.")
            os._exit(GAVE_UP)  # a normal exit would wait for threads of the service


class Feed:
    """The rows of a record while it is written, and a count of the rows that the service has received."""

    def __init__(self, task: ClientTask, listener: EndListener, note: Any) -> None:
        self._task = task
        self._listener = listener
        self._note = note

    @property
    def status(self) -> str:
        """The status of the run, once it has ended."""
        return self._listener.ending.status

    def chunks(self) -> Iterator[list[dict[str, Any]]]:
        """Yield lists of the record's objects, each with those that became available together, until the run ends."""
        return chunks(Path(self._task.record), self._listener)

    def rows(self, record: Mapping[str, Any], histogram: Histogram | None) -> list[dict[str, Any]]:
        """Convert one object of the record to rows, ordered by step."""
        return rows(record, self._task.step_points, histogram)

    def noted_count(self) -> int:
        """Return the number of rows that earlier clients of this run have passed on."""
        self._note.seek(0)
        return int(self._note.read() or 0)

    def note_count(self, count: int) -> None:
        """Store the number of rows that have been passed on."""
        self._note.seek(0)
        self._note.write(f"{count:{WIDTH}}")
        self._note.flush()


def chunks(path: Path, listener: EndListener) -> Iterator[list[dict[str, Any]]]:
    """Yield the objects of a JSONL file while it is written, until the run ends; a truncated line is skipped."""
    rest = b""
    with path.open("rb") as file:
        while True:
            over = listener.wait(0)
            size = listener.ending.size if over else None
            data = file.read(CHUNK if size is None else max(0, min(CHUNK, size - file.tell())))
            if os.fstat(file.fileno()).st_size < file.tell():
                raise RecordReplacedError(f"{path} was overwritten by another run.")
            if data:
                *lines, rest = (rest + data).split(b"\n")
                yield list(map(json.loads, lines))
            elif over:
                return
            else:
                listener.wait(PAUSE)


def rows(record: Mapping[str, Any], step_points: Sequence[str], histogram: Histogram | None) -> list[dict[str, Any]]:
    """Convert one line of the record to rows of the service's history, ordered by step.

    A value goes to the row of the line's step. Each value of a series goes to the row of its step. If the service has a
    ``histogram``, the row of the line's step gets ``metric/mean`` and ``metric/histogram`` of the series.
    """
    epoch, step, point = record["epoch"], record["step"], record["hook_point"]
    by_step: dict[int, dict[str, Any]] = {}
    for name, value in record.items():
        if name in ("epoch", "step", "hook_point"):
            continue
        if point in step_points and isinstance(value, dict) and value.keys() == {"steps", "values"}:
            for value_step, item in zip(value["steps"], value["values"], strict=True):
                by_step.setdefault(value_step, {}).update(cells(name, item, histogram))
            if histogram is not None:
                by_step.setdefault(step, {}).update(summary(name, value["values"], histogram))
        else:
            by_step.setdefault(step, {}).update(cells(name, value, histogram))
    return [{"step": value_step, "epoch": epoch, **row} for value_step, row in sorted(by_step.items())]


def cells(name: str, value: Any, histogram: Histogram | None) -> dict[str, Any]:
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


def distribution(name: str, values: Sequence[float], histogram: Histogram | None) -> dict[str, Any]:
    """Return the histogram of the finite numbers, or mean and range without one, and the number of other values.

    >>> distribution("h", [1.0, 3.0, float("nan")], None)
    {'h/mean': 2.0, 'h/min': 1.0, 'h/max': 3.0, 'h/non_finite': 1}
    """
    finite = [number for number in map(as_float, values) if math.isfinite(number)]
    others = len(values) - len(finite)
    shown: dict[str, Any] = {}
    if finite and histogram is not None:
        shown = {name: histogram(finite)}
    elif finite:
        shown = {
            f"{name}/mean": math.fsum(finite) / len(finite),
            f"{name}/min": min(finite),
            f"{name}/max": max(finite),
        }
    return shown | ({f"{name}/non_finite": others} if others else {})


def summary(name: str, values: Sequence[Any], histogram: Histogram) -> dict[str, Any]:
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


@contextmanager
def exclusive_run(task: ClientTask) -> Iterator[Any]:
    """Lock the service's run against other clients, waiting for an earlier one, and yield the file of its row count.

    The file contains the number of rows that the clients have passed on.
    """
    path = task.files / f"{task.run_id}.rows"
    path.touch()
    # The client of a killed run keeps sending the recorded rows, possibly while the run is resumed.
    with path.open("r+") as note:
        fcntl.flock(note, fcntl.LOCK_EX)
        yield note


def send_function(program: str) -> Callable[[ClientTask, Feed], str]:
    """Return the function ``send`` of a file."""
    spec = spec_from_file_location("client", program)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    function: Callable[[ClientTask, Feed], str] = module.send
    return function


_output = 1  # the descriptor for sentences; main() separates it from what services print


def report(sentence: str) -> None:
    """Write a sentence for the process that trains."""
    with suppress(OSError):  # the reader may have ended
        os.write(_output, (" ".join(sentence.split()) + "\n").encode())


def main() -> int:
    """Send the record of the task, and return the exit status."""
    global _output
    _output = os.dup(1)
    os.dup2(2, 1)  # services print on standard output; nothing reads that pipe during the run
    task = ClientTask(**json.loads(Path(sys.argv[1]).read_text("utf-8")))
    listener = EndListener(sys.stdin, task.patience, task.title)
    with suppress(OSError):
        os.nice(10)  # training takes precedence
    try:
        with exclusive_run(task) as note:
            outcome = send_function(task.program)(task, Feed(task, listener, note))
    except Exception as error:
        report(f"{type(error).__name__}: {error}")
        raise
    report(outcome)
    return 0


if __name__ == "__main__":
    sys.exit(main())
