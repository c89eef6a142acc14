"""Costs of measuring and clipping the two gradients of a tied matrix, and of the loop and the start of ``tied_lm``."""

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import count, pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
from loopscope.data import derived_seed
from loopscope.engine import HookManager
from loopscope.experiments.tied_lm import TiedLMRunner
from loopscope.experiments.tied_lm.runner import QUICK, TiedLMConfig
from loopscope.hooks import HookPoint, RunInfo, StepSchedule, TrainingHook
from loopscope.loops import step_loop
from loopscope.runs import build_run
from loopscope.state import TrainingState
from loopscope.training import TrainingTask
from loopscope.training_hooks import EmbeddingProvenance, OutputProjectionClip
from torch import Tensor
from torch.nn import functional

from tests.benchmarks.loop_cost import Alternating, HeavyWork
from tests.benchmarks.rows import PERCENT, SECONDS, Effort, Row
from tests.benchmarks.subjects import AfterStep
from tests.benchmarks.timing import Spread, clock
from tests.support import WatchedManager

ROOT = Path(__file__).parents[2]
TINY = QUICK | {"vocabulary": 300, "width": 16, "layers": 1, "context": 8, "batch_size": 2, "warmup_steps": 2}
WARM_UP = 6
HOOKS: Mapping[str, tuple[Callable[[], TrainingHook], float | None]] = {
    "embedding_provenance": (EmbeddingProvenance, 0.02),
    "output_projection_clip, weight": (OutputProjectionClip, 0.03),
    "output_projection_clip, logits": (lambda: OutputProjectionClip(scope="logits"), None),
}
"""The hooks by label, each with its permitted share of a step."""


class LanguageRun(NamedTuple):
    """A run of the experiment with its training tokens."""

    task: TrainingTask
    state: TrainingState
    tokens: Tensor


def language_model(options: Mapping[str, Any]) -> LanguageRun:
    """Build a run as ``loopscope run`` does, without evaluations."""
    runner = TiedLMRunner(TiedLMConfig(**options))
    task, state = build_run(runner, "baseline")
    return LanguageRun(replace(task, eval_every=0), state, torch.from_numpy(np.array(runner.data.train)))


def run_options(effort: Effort) -> dict[str, Any]:
    """Return the quick preset, or a smaller model if the effort is zero."""
    return QUICK if effort.share > 0 else TINY


class TimedManager(WatchedManager):
    """A manager that sums the time of the visits and of the taps."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.work = HeavyWork()
        self.hooks.call_tap = self.work.timed(self.hooks.call_tap)  # type: ignore[method-assign]

    def watch_call(self, point: HookPoint, call: Callable[[], None]) -> None:
        begin = clock()
        call()
        self.work.seconds += clock() - begin


def hooks_on_the_tied_matrix(effort: Effort) -> Iterator[Row]:
    """Compare a hook's time at every other step of a run with the steps between, without the hook."""
    for label, (make, bar) in HOOKS.items():
        totals, hook_seconds = _every_other_step(language_model(run_options(effort)), make(), max(5, effort.times(80)))
        step = median(totals[1::2])
        against = f"a step without it, quick preset, {step * 1e3:.0f} ms"
        yield Row(f"{label}, every step", against, PERCENT, Spread.of([each / step for each in hook_seconds[::2]]), bar)
        extra = [(due - idle) / step for due, idle in zip(totals[::2], totals[1::2], strict=True)]
        yield Row(f"Steps with {label} minus steps without", against, PERCENT, Spread.of(extra))


def _every_other_step(run: LanguageRun, hook: TrainingHook, pairs: int) -> tuple[list[float], list[float]]:
    """Return the seconds of steps in the real loop, with every other step measured, and the hook's share."""
    hook.step_schedule = StepSchedule(mode="stride", every_n_steps=2)
    task, state = replace(run.task, length=WARM_UP + 2 * pairs), run.state
    manager = TimedManager([hook], task, state, loop="step")
    ends = [(clock(), 0.0)]
    manager.start_hooks(run_info(task))
    step_loop(task, manager, progress=AfterStep(lambda: ends.append((clock(), manager.work.seconds))))
    manager.end("completed")
    steps = [(end[0] - begin[0], end[1] - begin[1]) for begin, end in pairwise(ends)]
    return [total for total, _ in steps[WARM_UP:]], [hook_seconds for _, hook_seconds in steps[WARM_UP:]]


def run_info(task: TrainingTask) -> RunInfo:
    return RunInfo(
        experiment="tied_lm",
        strategy="baseline",
        output_dir=Path("unused"),
        task=task,
        loop="step",
        seed=task.config.seed,
        optimizer_class=type(task.optimizer),
    )


def loop_without_hooks(effort: Effort) -> Iterator[Row]:
    """Compare steps of the experiment's loop with those of a loop written by hand, in turn, on one model."""
    run = language_model(run_options(effort))
    loader = Alternating(run.task.loader, bare_steps(run.task, run.tokens), HeavyWork())
    task = replace(run.task, loader=loader, length=WARM_UP + max(5, effort.times(150)))
    step_loop(task, HookManager((), task, run.state, loop="step"))
    pairs = [pair for epoch in loader.pairs for pair in epoch][WARM_UP:]
    tokens = task.config.batch_size * task.config.context
    step = median(bare.total for bare, _ in pairs)
    against = f"bare loop, quick preset, {step * 1e3:.0f} ms a step, {tokens / step:,.0f} tokens/s"
    rates = Spread.of([bare.total / ours.total for bare, ours in pairs])
    best = min(bare.total for bare, _ in pairs) / min(ours.total for _, ours in pairs)
    yield Row("Tokens per second without hooks", against, PERCENT, replace(rates, best=best), floor=0.97)


def bare_steps(task: TrainingTask, tokens: Tensor) -> Iterator[None]:
    """Train without end on the experiment's batches in a loop as one would write it, stopping after every step."""
    config, model, optimizer, scheduler = task.config, task.model, task.optimizer, task.scheduler
    window = torch.arange(config.context)
    assert scheduler is not None
    for number in count():
        generator = torch.Generator().manual_seed(derived_seed(config.seed, "windows", number))
        first = torch.randint(len(tokens) - config.context, (config.batch_size, 1), generator=generator)
        inputs, targets = tokens[first + window], tokens[first + window + 1]
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        scheduler.step()
        yield


def start(effort: Effort) -> Iterator[Row]:
    """Time the command from its start to the end of its first step, and a bare program that takes a step."""
    command = ["run", "tied_lm", "--preset", "quick", "--steps", "1", "--output-dir"]
    seconds: dict[str, list[float]] = {"bare": [], "cpu": [], "wall": []}
    for _ in range(effort.times(5)):
        with tempfile.TemporaryDirectory() as folder:
            begin = time.perf_counter()
            seconds["cpu"].append(_seconds_of(*command, folder))
            seconds["wall"].append(time.perf_counter() - begin)
        seconds["bare"].append(_seconds_of())
    against = f"importing torch and a step of AdamW take {median(seconds['bare']):.2f} s"
    yield Row("Import and start to the first step", against, SECONDS, Spread.of(seconds["cpu"]), 6.0)
    label = "Import and start to the first step, wall clock"
    yield Row(label, "other load included", SECONDS, Spread.of(seconds["wall"]))


def _seconds_of(*arguments: str) -> float:
    command = [sys.executable, "-m", "tests.benchmarks.first_step", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return float(done.stdout.splitlines()[-1])
