"""What durable checkpoints cost: the copy for which the loop waits, the writing beside it, and the way back."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from framework.checkpoint_writer import CheckpointWriter
from framework.checkpointing import Checkpointing, CheckpointPlan
from framework.manager import HookManager
from framework.signals import Signals
from tests.benchmarks.rows import PERCENT, TIMES, Effort, Row
from tests.benchmarks.subjects import Subject, mod_arithmetic
from tests.benchmarks.timing import Spread, clock, ratio

INTERVAL = 100  # steps
FIRST_STEP = Path(__file__).with_name("first_step.py")


def checkpoints(effort: Effort) -> Iterator[Row]:
    """Measure a checkpoint in the thread that trains and in that which writes, against steps and plain copies."""
    subject = mod_arithmetic(effort.paper)
    blocked, copied, written, steps = _measured(subject, effort.times(30))
    size = sum(tensor.nbytes for tensor in subject.tensors) / 1e6
    against = f"a copy of the same {size:.0f} MB, {1e3 * Spread.of(copied).median:.1f} ms"
    yield Row("Loop blocked by a checkpoint", against, TIMES, ratio(blocked, copied), 1.5)
    interval = INTERVAL * Spread.of(steps).median
    share = Spread.of([(one + other) / interval for one, other in zip(blocked, written, strict=True)])
    against = f"{INTERVAL} steps, {interval:.1f} s; CPU time of both threads"
    yield Row(f"A checkpoint every {INTERVAL} steps", against, PERCENT, share, 0.01)


def _measured(subject: Subject, rounds: int) -> tuple[list[float], ...]:
    """Return the seconds of taking, of a plain copy, of writing, and of a step, each after a step of its own."""
    seconds: tuple[list[float], ...] = ([], [], [], [])
    begin = [clock()]
    manager = HookManager((), subject.task, subject.state)
    buffers: list[Tensor] = []
    with TemporaryDirectory() as folder:
        writer = CheckpointWriter(Path(folder), keep=2)
        checkpointing = Checkpointing(
            manager,
            writer,
            CheckpointPlan(),
            Signals(),
            describe=lambda: {"step": subject.state.loop.step, "score": None},
        )

        def measure() -> None:
            seconds[3].append(clock() - begin[0])
            before, own = clock(), time.thread_time()
            checkpointing.take(wait=False)
            seconds[0].append(time.thread_time() - own)
            writer.wait()
            seconds[2].append(clock() - before - seconds[0][-1])
            seconds[1].append(_copy(subject, buffers))
            begin[0] = clock()

        subject.train(rounds + 2, measure)
    return tuple(values[2:] for values in seconds)


def _copy(subject: Subject, buffers: list[Tensor]) -> float:
    """Copy every tensor of the training state, and nothing else."""
    tensors = [tensor.detach() for tensor in subject.tensors]
    if len(buffers) != len(tensors):
        buffers[:] = [torch.empty_like(tensor) for tensor in tensors]
    begin = time.thread_time()
    torch._foreach_copy_(buffers, tensors)
    return time.thread_time() - begin


def resuming(effort: Effort) -> Iterator[Row]:
    """Measure the CPU time of a process up to its first step: of a run that goes on, and of one that begins."""
    with TemporaryDirectory() as folder:
        words = ["run", "mod_arithmetic", "--preset", "quick", "--strategy", "stride", "--no-console-output"]
        words += ["--max-epochs", "2", "--train-size", "320", "--test-size", "32", "--save-checkpoints", "1"]
        run = Path(folder) / "a/mod_arithmetic/stride"
        _run("-m", "experiments", *words, "--output-dir", f"{folder}/a")
        (run / "summary.json").unlink()
        (newest := max(run.glob("checkpoints/step_*"))).rename(newest.with_suffix(".removed"))
        fresh: list[float] = []
        resumed: list[float] = []
        for index in range(effort.times(7)):
            fresh.append(_first_step(*words, "--output-dir", f"{folder}/fresh{index}"))
            resumed.append(_first_step("resume", str(run)))
        yield Row("Resume to the first step", "a fresh start, CPU time", TIMES, ratio(resumed, fresh), 2.0)


def _first_step(*words: str) -> float:
    """Return the CPU seconds of a command up to its first step."""
    return float(_run(str(FIRST_STEP), *words).split()[-1])


def _run(*words: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    return subprocess.run(
        [sys.executable, *words], env=environment, check=True, capture_output=True, text=True, timeout=300
    ).stdout
