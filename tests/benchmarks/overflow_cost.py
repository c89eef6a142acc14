"""Costs of counting the casts of a low-bit language model, and of hypothetical casts of gradients."""

import warnings
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from loopscope.experiments.lowbit_lm import LowbitLMRunner
from loopscope.experiments.lowbit_lm.runner import COUNT_INTERVAL, QUICK, LowbitLMConfig
from loopscope.hooks import RunInfo
from loopscope.loops import step_loop
from loopscope.lowbit.casts.compiled import COMPILER
from loopscope.runs import build_run
from loopscope.state import TrainingState
from loopscope.training import TrainingTask
from loopscope.training_hooks.lowbit import GradientOverflow

from tests.benchmarks.rows import PERCENT, Effort, Row
from tests.benchmarks.subjects import AfterStep, language_model
from tests.benchmarks.tied_cost import TINY, TimedManager
from tests.benchmarks.timing import Spread, clock

SMALL = {"vocabulary": 64, "width": 64, "layers": 2, "length": 8}
INTERVAL = 100
BARS = {"output gradients and products, e2m1 under tensor, nvfp4 and mx_floor": 0.02}
"""Bars other than 1 %: the steps are short (320 tokens), and the cost hardly grows with their length."""
WARM_UP = 6
"""Steps before the first measured one; the first of them compiles the casts."""


def hypothetical_casts(effort: Effort) -> Iterator[Row]:
    """Compare the hook's time at every other step of a model of 10M parameters with the steps between."""
    subject = language_model() if effort.share > 0 else language_model(**SMALL)
    size = f"{sum(parameter.numel() for parameter in subject.task.model.parameters()) / 1e6:.0f}M parameters"
    for label, options in {
        "all gradients, e2m1 under tensor, nvfp4 and mx_floor": {"of": "gradients"},
        "all gradients, e4m3 and e5m2 under current": {"formats": "e4m3,e5m2", "rules": "current", "of": "gradients"},
        "output gradients and products, e2m1 under tensor, nvfp4 and mx_floor": {},
    }.items():
        totals, hook_seconds = _every_other_step(
            subject.task, subject.state, GradientOverflow(interval=2, **options), max(3, effort.times(15))
        )
        step = median(totals[1::2])
        against = f"{INTERVAL} steps without it, {step * 1e3:.0f} ms each, {size}"
        cost = Spread.of([seconds / step / INTERVAL for seconds in hook_seconds[::2]])
        yield Row(
            f"Hypothetical casts of {label}, every {INTERVAL} steps", against, PERCENT, cost, BARS.get(label, 0.01)
        )


def counting(effort: Effort) -> Iterator[Row]:
    """Compare steps of low-bit runs with counted casts with the steps between, without counting; all are compiled."""
    patience, COMPILER.patience = COMPILER.patience, -1
    try:
        yield from _counting(effort)
    finally:
        COMPILER.patience = patience


def _counting(effort: Effort) -> Iterator[Row]:
    options: dict[str, Any] = QUICK if effort.share > 0 else QUICK | TINY
    for strategy in ("fp8", "nvfp4", "fp4_metis"):
        task, state = build_run(LowbitLMRunner(LowbitLMConfig(**options)), strategy)
        hook = GradientOverflow(count_interval=2)
        totals, hook_seconds = _every_other_step(task, state, hook, max(3, effort.times(40)))
        step = median(totals[1::2])
        against = f"a step without it, lowbit_lm {strategy}, quick preset, {step * 1e3:.0f} ms"
        extra = [(due - idle) / step for due, idle in zip(totals[::2], totals[1::2], strict=True)]
        every_fourth = Spread.of([share / COUNT_INTERVAL for share in extra])
        yield Row(
            f"Counting one step in {COUNT_INTERVAL}, as lowbit_lm does, {strategy}",
            against,
            PERCENT,
            every_fourth,
            0.05,
        )
        yield Row(f"Counting every step, {strategy}", against, PERCENT, Spread.of(extra))
        yield Row(
            f"Of that, summing and reporting, {strategy}",
            against,
            PERCENT,
            Spread.of([o / step for o in hook_seconds[::2]]),
        )


def _every_other_step(
    task: TrainingTask, state: TrainingState, hook: GradientOverflow, pairs: int
) -> tuple[list[float], list[float]]:
    """Return the seconds of steps in the real loop, with every other step measured, and the hook's seconds."""
    first = state.loop.step
    task = replace(task, length=first + WARM_UP + 2 * pairs, eval_every=0, snapshot_every=10**9)
    manager = TimedManager([hook], task, state, loop="step")
    ends = [(clock(), 0.0)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        manager.start_hooks(_run_info(task))
        step_loop(task, manager, progress=AfterStep(lambda: ends.append((clock(), manager.work.seconds))))
        manager.end("completed")
    steps = [(end[0] - begin[0], end[1] - begin[1]) for begin, end in pairwise(ends)]
    return [total for total, _ in steps[WARM_UP:]], [hook_seconds for _, hook_seconds in steps[WARM_UP:]]


def _run_info(task: TrainingTask) -> RunInfo:
    return RunInfo(
        experiment="overflow",
        strategy="only",
        output_dir=Path("unused"),
        task=task,
        loop="step",
        seed=0,
        optimizer_class=type(task.optimizer),
    )
