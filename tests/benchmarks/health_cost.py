"""Costs of checks of gradients and weight updates of a model of 10M parameters, also against full clones."""

import gc
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

import torch
from loopscope.hooks import HookPoint
from loopscope.loops import epoch_loop
from loopscope.training_hooks import WeightUpdateMonitor, WeightUpdates
from torch import nn

from tests.benchmarks.memory_cost import tensor_bytes
from tests.benchmarks.rows import BYTES, COPIES, PERCENT, TIMES, Effort, Row
from tests.benchmarks.subjects import AfterStep, Subject, bare_steps, language_model
from tests.benchmarks.timing import Spread, Turns, clock, ratio
from tests.support import WatchedManager

SMALL = {"vocabulary": 64, "width": 64, "layers": 2, "length": 8}
INTERVAL = 100
BARS: Mapping[str, tuple[dict[str, Any], float]] = {"sampled": ({}, 0.05), "exact": ({"exact": True}, 0.06)}


def _subject(effort: Effort) -> Subject:
    """Build the language model, or a smaller one if the effort is zero."""
    return language_model() if effort.share > 0 else language_model(**SMALL)


class TimedManager(WatchedManager):
    """A manager that sums the time of the visits of a step."""

    fires: float = 0.0

    def watch_call(self, point: HookPoint, call: Callable[[], None]) -> None:
        begin = clock()
        call()
        self.fires += clock() - begin


@dataclass
class Steps:
    """Records the seconds of steps in the real loop, and their share spent on visits."""

    manager: TimedManager
    seconds: list[float] = field(default_factory=list)
    fires: list[float] = field(default_factory=list)
    _begin: float = 0.0

    def take(self) -> None:
        """Record the end of a step."""
        now, fires = clock(), self.manager.fires
        self.seconds.append(now - self._begin)
        self.fires.append(fires)
        self.manager.fires, self._begin = 0.0, clock()


def checked_every_other_step(effort: Effort) -> Iterator[Row]:
    """Compare checked steps with their unchecked neighbours, in one run of each mode."""
    for mode, (options, bar) in BARS.items():
        subject = _subject(effort)
        steps = _trained(subject, WeightUpdates(interval=2, **options), max(8, effort.times(80)))
        bare = [total - fires for total, fires in zip(steps.seconds, steps.fires, strict=True)]
        due, idle = (slice(4, None, 2), slice(5, None, 2))  # the first checks select the watched elements
        step = median(bare[4:])
        against = f"a step of the real loop, {step * 1e3:.0f} ms, {_size(subject.task.model)}"
        cost = Spread.of([fire / step for fire in steps.fires[due]])
        yield Row(f"weight_updates, {mode}, every step", against, PERCENT, cost, bar)
        pairs = zip(steps.seconds[due], steps.seconds[idle], strict=False)
        difference = Spread.of([(one - other) / step for one, other in pairs])
        yield Row(f"Checked minus unchecked steps, {mode}", against, PERCENT, difference)
        if mode == "sampled":
            rest = (INTERVAL - 1) * median(steps.fires[idle])
            spread = Spread.of([(fire + rest) / INTERVAL / step for fire in steps.fires[due]])
            yield Row(f"weight_updates, {mode}, every {INTERVAL} steps", against, PERCENT, spread, 0.001)


def _trained(subject: Subject, hook: WeightUpdates, count: int) -> Steps:
    manager = TimedManager([hook], subject.task, subject.state)
    steps = Steps(manager)
    subject.task.length = -(-count // len(subject.task.loader))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        epoch_loop(subject.task, manager, progress=AfterStep(steps.take))
    return steps


def against_full_clones(effort: Effort) -> Iterator[Row]:
    """Compare the plain monitor with clones of all parameters that report the same numbers, after training steps."""
    subject = _subject(effort)
    model, optimizer, train = subject.task.model, subject.task.optimizer, bare_steps(subject)
    monitors = {mode: WeightUpdateMonitor(**options) for mode, (options, _) in BARS.items()}
    checks = [partial(_check, monitor, model, optimizer) for monitor in monitors.values()]
    turns = Turns([*checks, partial(_clone_and_compare, model)], after=lambda: next(train))
    turns.after()
    turns.round()
    turns.forget()
    for _ in range(max(2, effort.times(20))):
        turns.round()
    for seconds, (mode, floor) in zip(turns.seconds, (("sampled", 5.0), ("exact", None)), strict=False):
        label = f"Full clones against {mode} checks, time"
        yield Row(label, "both checks of a step", TIMES, ratio(turns.seconds[-1], seconds), floor=floor)
    size, tensors = sum(each.nbytes for each in model.parameters()), len(list(model.parameters()))
    kept = {mode: _kept(options, model, optimizer) for mode, (options, _) in BARS.items()}
    against = _size(model)
    yield Row("Full clones against sampled checks, memory", against, TIMES, _one(size / kept["sampled"]), floor=50)
    yield Row("Kept for each tensor, sampled", against, BYTES, _one(kept["sampled"] / tensors), 8192)
    yield Row("Kept, exact", against, COPIES, _one(kept["exact"] / size), 1.01)


def _check(monitor: WeightUpdateMonitor, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    monitor.check_gradients(model, optimizer)
    monitor.check_updates(model, optimizer)


@torch.no_grad()
def _clone_and_compare(model: nn.Module) -> dict[str, tuple[float, ...]]:
    """Compute the same metrics naively: a clone of every parameter, and one number at a time."""
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    found: dict[str, tuple[float, ...]] = {}
    for name, value in model.named_parameters():
        assert value.grad is not None
        sizes = value.grad.abs()
        found[name] = (value.grad.norm().item(), sizes.max().item(), sizes.mean().item())
    for name, value in model.named_parameters():
        found[name] += ((value - before[name]).norm().item(), before[name].norm().item())
    return found


def _kept(options: Mapping[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of the tensors that a monitor keeps after its first check."""
    gc.collect()
    before = tensor_bytes()
    monitor = WeightUpdateMonitor(**options)
    monitor.check_gradients(model, optimizer)
    gc.collect()
    return tensor_bytes() - before


def _one(value: float) -> Spread:
    return Spread.of([value])


def _size(model: nn.Module) -> str:
    parameters = list(model.parameters())
    return f"{sum(each.numel() for each in parameters) / 1e6:.1f}M parameters in {len(parameters)} tensors"
