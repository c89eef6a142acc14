"""Costs of smoothing and averaging the weights of a model of 10M parameters, against lerps of the same bytes."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from loopscope.hooks import HookPoint, RunInfo, TrainingHook
from loopscope.training_hooks import ModelSmoother, ModelSmoothing, SmoothingConfig, WeightAverage
from torch import Tensor, nn

from tests.benchmarks.rows import MILLISECONDS, TIMES, Effort, Row
from tests.benchmarks.subjects import Subject, language_model, mod_arithmetic
from tests.benchmarks.timing import Spread, Turns, clock, ratio

ALPHA = 0.5
TRASH = 2**24
"""Elements read before every measurement, so that the caches contain nothing of the previous one."""


def smoothing(effort: Effort) -> Iterator[Row]:
    """Compare a smoothing with a lerp of parameters and buffers, and with lerp and copy one after the other."""
    model = _subject(effort).task.model
    parameters = list(model.parameters())
    buffers = [parameter.detach().clone() for parameter in parameters]
    smoother = ModelSmoother(model, SmoothingConfig(alpha=ALPHA))
    lerp, copy = partial(_lerp, parameters, buffers), partial(_copy, buffers, parameters)
    turns = Turns([lerp, smoother.smooth, lambda: (lerp(), copy())], after=_emptied_caches())
    turns.after()
    for _ in range(max(2, effort.times(60))):
        turns.round()
    reference, ours, naive = turns.seconds
    against = f"torch._foreach_lerp_ of {_size(model)}, {1e3 * Spread.of(reference).median:.2f} ms"
    yield Row("A smoothing step", against, TIMES, ratio(ours, reference), 1.45)
    yield Row("_foreach_lerp_, then _foreach_copy_", against, TIMES, ratio(naive, reference))


def fires(effort: Effort) -> Iterator[Row]:
    """Time the visits of the two hooks after training steps."""
    hooks: list[TrainingHook] = [ModelSmoothing(update_interval=1), WeightAverage(interval=1, averages="ema")]
    for hook in hooks:
        subject = _subject(effort)
        step, fire = _fires(subject, hook, max(3, effort.times(20)))
        against = f"each due call; a step takes {1e3 * Spread.of(step).median:.0f} ms"
        yield Row(f"{hook.name}, one call, {_size(subject.task.model)}", against, MILLISECONDS, Spread.of(fire))


def _subject(effort: Effort) -> Subject:
    """Build the language model, or a small model if the effort is zero."""
    return language_model() if effort.share > 0 else mod_arithmetic(effort.quick)


def _size(model: nn.Module) -> str:
    parameters = list(model.parameters())
    return f"{sum(parameter.numel() for parameter in parameters) / 1e6:.1f}M parameters in {len(parameters)} tensors"


@torch.no_grad()
def _lerp(parameters: list[nn.Parameter], buffers: list[Tensor]) -> None:
    torch._foreach_lerp_(parameters, buffers, ALPHA)


@torch.no_grad()
def _copy(buffers: list[Tensor], parameters: list[nn.Parameter]) -> None:
    torch._foreach_copy_(buffers, parameters)


def _emptied_caches() -> Callable[[], Tensor]:
    return torch.zeros(TRASH).sum


def _fires(subject: Subject, hook: TrainingHook, steps: int) -> tuple[list[float], list[float]]:
    """Return the seconds of each of ``steps`` steps, and of the visit after each."""
    manager = subject.manager([hook])
    manager.start_hooks(_run(subject, steps))
    step_seconds: list[float] = []
    fire_seconds: list[float] = []
    last = clock()

    def fire() -> None:
        nonlocal last
        begin = clock()
        step_seconds.append(begin - last)
        manager.fire(HookPoint.POST_STEP)
        last = clock()
        fire_seconds.append(last - begin)

    subject.train(steps, fire)
    return step_seconds[2:], fire_seconds[2:]


def _run(subject: Subject, steps: int) -> RunInfo:
    task = subject.task
    return RunInfo(
        experiment="benchmark",
        strategy="only",
        output_dir=Path("unused"),
        task=replace(task, length=-(-steps // len(task.loader))),
        loop="epoch",
        seed=0,
        optimizer_class=type(task.optimizer),
    )
