"""Costs of checkpoints: the copy that blocks the loop, the write in another thread, and the resume."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from loopscope.checkpoints import Checkpointing, CheckpointPlan, CheckpointWriter, Signals
from loopscope.engine import HookManager
from loopscope.tensors import local_shards
from torch import Tensor

from tests.benchmarks.rows import PERCENT, TIMES, Effort, Row
from tests.benchmarks.subjects import Subject, mod_arithmetic
from tests.benchmarks.timing import Spread, clock, ratio

INTERVAL = 100  # steps
WINDOW = 6  # steps, in which a checkpoint is written
FIRST_STEP = Path(__file__).with_name("first_step.py")


def checkpoints(effort: Effort) -> Iterator[Row]:
    """Measure a checkpoint in the training thread and in the writer thread, against steps and plain copies."""
    subject = mod_arithmetic(effort.paper)
    measured = Measured(subject)
    measured.train(effort.times(30))
    size = sum(tensor.nbytes for tensor in subject.tensors) / 1e6
    against = f"a copy of the same {size:.0f} MB, {1e3 * Spread.of(measured.copied).median:.1f} ms"
    yield Row("Loop blocked by a checkpoint", against, TIMES, ratio(measured.blocked, measured.copied), 1.5)
    interval = INTERVAL / WINDOW * Spread.of(measured.without_checkpoint).median
    against = f"{INTERVAL} steps, {interval:.1f} s, wall clock"
    slower = [
        (one - other) / interval
        for one, other in zip(measured.with_checkpoint, measured.without_checkpoint, strict=True)
    ]
    yield Row(f"A checkpoint every {INTERVAL} steps", against, PERCENT, Spread.of(slower), 0.01)
    both = [seconds / interval for seconds in measured.both]
    label = f"A checkpoint every {INTERVAL} steps, CPU time of both threads"
    yield Row(label, f"{INTERVAL} steps, {interval:.1f} s", PERCENT, Spread.of(both), 0.015)


class Measured:
    """Trains in windows of steps, alternating between windows alone and windows with a checkpoint at their start."""

    def __init__(self, subject: Subject) -> None:
        self.blocked: list[float] = []
        self.copied: list[float] = []
        self.with_checkpoint: list[float] = []
        self.without_checkpoint: list[float] = []
        self.both: list[float] = []
        self._subject = subject
        self._buffers: list[Tensor] = []
        self._steps = 0

    def train(self, rounds: int) -> None:
        """Train a number of pairs of windows, after one to warm up."""
        subject, ranks = self._subject, self._subject.task.ranks
        shared = {"ranks": ranks.arrangement(subject.task.model)} if ranks.are_many else {}
        describe = lambda: {"step": subject.state.loop.step, "score": None, **shared}
        with TemporaryDirectory() as folder:
            self._writer = CheckpointWriter(Path(ranks.gather(folder)[0]), 2, ranks)
            manager = HookManager((), subject.task, subject.state)
            self._checkpointing = Checkpointing(manager, self._writer, CheckpointPlan(), Signals(), describe=describe)
            self._begin = time.perf_counter()
            subject.train((rounds + 2) * 2 * WINDOW, self._after_step)
            self._writer.finish()
            ranks.join()
        count = min(map(len, (self.with_checkpoint, self.without_checkpoint, self.copied)))
        for values in (self.blocked, self.copied, self.with_checkpoint, self.without_checkpoint, self.both):
            values[:] = values[2:count]

    def _after_step(self) -> None:
        self._steps += 1
        if self._steps % WINDOW:
            return
        seconds = time.perf_counter() - self._begin
        if self._steps // WINDOW % 2:
            self.without_checkpoint.append(seconds)
            self.copied.append(_copy(self._subject, self._buffers))
            self._begin = time.perf_counter()
            own = time.thread_time()
            self._checkpointing.take(wait=False)
            self.blocked.append(time.thread_time() - own)
        else:
            self.with_checkpoint.append(seconds)
            self._writer.wait()
            self.both.append(self._take_alone())
            self._begin = time.perf_counter()

    def _take_alone(self) -> float:
        """Take a checkpoint as during a run, but without other work, and return the CPU time of both threads."""
        begin = clock()
        self._checkpointing.take(wait=False)  # waiting also removes the file that the next one is written over
        self._writer.wait()
        return clock() - begin


def _copy(subject: Subject, buffers: list[Tensor]) -> float:
    """Copy every tensor of the training state, and nothing else."""
    tensors = local_shards([tensor.detach() for tensor in subject.tensors])
    if len(buffers) != len(tensors):
        buffers[:] = [torch.empty_like(tensor) for tensor in tensors]
    begin = time.thread_time()
    torch._foreach_copy_(buffers, tensors)
    return time.thread_time() - begin


def resuming(effort: Effort) -> Iterator[Row]:
    """Measure the CPU time of a process up to its first step, for a resumed run and for a new one."""
    yield Row("Resume to the first step", "a fresh start, CPU time", TIMES, _resumed(effort, []), 2.0)


def resuming_together(effort: Effort) -> Iterator[Row]:
    """Measure the same for two processes that share the parameters."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    against = "a fresh start of 2 processes, CPU time"
    yield Row("Resume to the first step, FSDP2", against, TIMES, _resumed(effort, torchrun), 2.0)


def _resumed(effort: Effort, launcher: list[str]) -> Spread:
    with TemporaryDirectory() as folder:
        words = ["run", "mod_arithmetic", "--preset", "quick", "--strategy", "stride", "--no-console-output"]
        words += ["--max-epochs", "2", "--train-size", "320", "--test-size", "32", "--save-checkpoints", "1"]
        words += ["--parallel", "fsdp"] if launcher else []
        run = Path(folder) / "a/mod_arithmetic/stride"
        _run(*launcher, "-m", "loopscope", *words, "--output-dir", f"{folder}/a")
        (run / "summary.json").unlink()
        (newest := max(run.glob("checkpoints/step_*"))).rename(newest.with_suffix(".removed"))
        fresh: list[float] = []
        resumed: list[float] = []
        for index in range(effort.times(7)):
            fresh.append(_first_step(launcher, *words, "--output-dir", f"{folder}/fresh{index}"))
            resumed.append(_first_step(launcher, "resume", str(run)))
        return ratio(resumed, fresh)


def _first_step(launcher: list[str], *words: str) -> float:
    """Return the CPU seconds of a command up to its first step; with several processes those of one."""
    return float(_run(*launcher, str(FIRST_STEP), *words).split()[-1])


def _run(*words: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    return subprocess.run(
        [sys.executable, *words], env=environment, check=True, capture_output=True, text=True, timeout=300
    ).stdout
