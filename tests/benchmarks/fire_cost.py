"""Costs of ``HookManager.fire`` without listeners, and with observers that return a float."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from loopscope.hooks import HookPoint, TrainingHook

from tests.benchmarks.rows import MICROSECONDS, Effort, Row
from tests.benchmarks.subjects import Subject, deep_mlp, mod_arithmetic, observers
from tests.benchmarks.timing import Spread, Turns, difference

WARM_CALLS = 20
POINT = HookPoint.POST_STEP


def empty_dispatch(effort: Effort) -> Iterator[Row]:
    """Measure a call of ``fire`` at a point without listeners."""
    manager = mod_arithmetic(effort.quick).manager(observers(1))
    turns = Turns([partial(manager.fire, HookPoint.PRE_STEP)], calls=effort.times(2000))
    for _ in range(effort.times(200)):
        turns.round()
    yield Row("Empty visit", "nothing", MICROSECONDS, Spread.of(turns.seconds[0]), 1e-6)


def observers_per_dispatch(effort: Effort) -> Iterator[Row]:
    """Measure one and ten observers, against calling them."""
    subject = mod_arithmetic(effort.quick)
    for count, label, bar in ((1, "One observer", 100e-6), (10, "Ten observers", 450e-6)):
        against = f"{count} {'call' if count == 1 else 'calls'} of compute"
        warm = _fires(subject, observers(count), WARM_CALLS, effort.times(90))
        yield Row(f"{label}, warm", f"{against}, {len(subject.tensors)} tensors", MICROSECONDS, warm, bar)
        cold = _fires(subject, observers(count), 1, effort.times(180))
        yield Row(f"{label}, first visit after a step", against, MICROSECONDS, cold)


LAYERS = (15, 60, 200)
"""Numbers of layers of the models for :func:`cost_per_tensor`, whose states have ten tensors for each layer."""


def cost_per_tensor(effort: Effort) -> Iterator[Row]:
    """Measure the first visit of one observer after a step, and its growth with the tensors of the state."""
    smaller: tuple[int, Spread] | None = None
    for layers in LAYERS:
        subject = deep_mlp(layers)
        fires = _fires(subject, observers(1), 1, effort.times(90))
        count = len(subject.tensors)
        yield Row(f"One observer, {count:,} tensors", "1 call of compute", MICROSECONDS, fires)
        if smaller is not None:
            step, less = count - smaller[0], smaller[1]
            growth = Spread(
                (fires.median - less.median) / step, (fires.best - less.best) / step, (fires.noise + less.noise) / step
            )
            yield Row("For each further tensor", f"{smaller[0]:,} tensors", MICROSECONDS, growth, 3e-6)
        smaller = count, fires


def _fires(subject: Subject, hooks: list[TrainingHook], calls: int, steps: int) -> Spread:
    """Time visits after each of ``steps`` training steps, while gradients, batch and loss exist."""
    manager = subject.manager(hooks)
    fire = partial(manager.fire, POINT)
    subject.train(1, fire)
    turns = Turns([fire, _direct(hooks)], calls, after=partial(manager.delivery.flush_steps, 0))
    subject.train(steps, turns.round)
    return difference(*turns.seconds)


def _direct(hooks: list[Any]) -> Callable[[], None]:
    calls = [partial(hook.compute, hook.context) for hook in hooks]

    def call_all() -> None:
        for call in calls:
            call()

    return call_all
