"""The record of 100,000 steps with the group ``health``: its size, and time and size of the page and the diagnosis."""

import resource
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import loopscope

from tests.benchmarks.rows import SECONDS, Effort, Row, Unit
from tests.benchmarks.subjects import small_mlp
from tests.benchmarks.timing import Spread

STEPS = 100_000
MEGABYTES = Unit("MB", 1e-6, 2)


def long_record(effort: Effort) -> Iterator[Row]:
    """Train a small MLP for many steps and time the commands that read its record."""
    steps = effort.times(STEPS)
    with tempfile.TemporaryDirectory() as folder:
        run, page = Path(folder) / "run", Path(folder) / "page.html"
        _train(run, steps)
        size = sum(path.stat().st_size for path in run.iterdir())
        against = f"{steps:,} steps of an MLP of 4 tensors, group health"
        yield Row("Record, size", against, MEGABYTES, Spread.of([size]))
        yield Row("loopscope report, CPU time", against, SECONDS, Spread.of([_command("report", run, "--out", page)]))
        yield Row("loopscope report, size of the page", against, MEGABYTES, Spread.of([page.stat().st_size]))
        yield Row("loopscope doctor, CPU time", against, SECONDS, Spread.of([_command("doctor", run)]))
        yield Row("loopscope show, CPU time", against, SECONDS, Spread.of([_command("show", run)]))


def _train(folder: Path, steps: int) -> None:
    subject = small_mlp()
    task = subject.task
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with loopscope.attach(task.model, task.optimizer, with_hooks="health", out=folder, display="none") as scope:
            for _ in range(-(-steps // len(task.loader))):
                for batch in scope.batches(task.loader):
                    task.optimizer.zero_grad()
                    scope.backward(task.compute_loss(task.model, batch))
                    task.optimizer.step()


def _command(*words: object) -> float:
    """Run a command of loopscope and return the CPU time of its process, its start included."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "loopscope", *map(str, words)]
    subprocess.run(command, capture_output=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
