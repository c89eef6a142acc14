"""Costs of groups of hooks on models of real sizes: own CPU time, first step, close, record and peak memory.

``python -m tests.benchmarks.real_size_cost MODEL GROUP`` trains a few steps in a fresh process and prints its peak
memory.
"""

import gc
import statistics
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any
from unittest import mock

import loopscope
import torch
from loopscope.hooks import HookRegistry
from loopscope.hooks.selection import hook_groups
from loopscope.sinks import CSVSink, JSONLSink
from loopscope.training.profiler import peak_resident_bytes
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.benchmarks.real_models import GPT, MODELS
from tests.benchmarks.rows import MILLISECONDS, SECONDS, TIMES, Effort, Row, Unit
from tests.benchmarks.subjects import Constant
from tests.benchmarks.timing import Spread, clock
from tests.support.ranks import on_ranks

DUE = 4
"""Interval of hooks in the measurement; ordinary and due steps are weighted as with intervals of ``PERIOD``."""
PERIOD = 50
ONE = "one observer, every step"
GROUPS = ("health", "observers", ONE, "full")
SLOW = frozenset({"full"})
"""Groups whose due steps take minutes: only their first two are measured, and the steps between these."""
MEMORY_STEPS = 9
"""Steps of a process whose memory is measured: from the fifth one on, every hook of ``observers`` has its copies."""
RANKS = 2
KILOBYTES = Unit("kB", 1e-3, 1)


@dataclass(frozen=True)
class Bars:
    """The most that a group may cost; ``step`` and ``memory`` in multiples of the bare loop, the others in seconds."""

    step: float | None = None
    memory: float | None = None
    first: float | None = None
    close: float | None = None


BARS = {("gpt", "health"): Bars(1.03, 1.15, 1.0, 1.0), ("gpt", "observers"): Bars(1.10, 1.3, 1.0, 1.0)}


def as_it_is(model: nn.Module) -> nn.Module:
    """Return the model."""
    return model


def replicated(model: nn.Module) -> nn.Module:
    """Return the model under DistributedDataParallel."""
    return DistributedDataParallel(model)


def sharded(model: nn.Module) -> nn.Module:
    """Return the model with its blocks and its remaining parameters sharded by FSDP2."""
    layers = model.blocks if isinstance(model, GPT) else model.get_submodule("model.layers").children()
    for layer in layers:
        assert isinstance(layer, nn.Module)
        fully_shard(layer)
    return fully_shard(model)


WRAPS: Mapping[str, Callable[[nn.Module], nn.Module]] = {"DDP": replicated, "FSDP2": sharded}


@dataclass
class Training:
    """A training whose steps are timed one by one; the group ``bare`` is a loop without loopscope.

    ``interval`` replaces the intervals of the group's hooks.
    """

    model_name: str
    group: str
    stack: ExitStack
    is_tiny: bool
    interval: int | None = None
    wrap: Callable[[nn.Module], nn.Module] = as_it_is
    seconds: list[float] = field(default_factory=list)
    """The CPU time of each step."""
    write_seconds: float = 0.0
    """The CPU time in which the sinks wrote metrics."""

    def __post_init__(self) -> None:
        self._real = MODELS[self.model_name]
        model, self._batch = self._real.built(is_tiny=self.is_tiny)
        self._model = self.wrap(model)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=3e-4)
        self._scope = None
        if self.group != "bare":
            self.folder = Path(self.stack.enter_context(tempfile.TemporaryDirectory())) / "run"
            for sink in (CSVSink, JSONLSink):
                self.stack.enter_context(mock.patch.object(sink, "emit", self._timed(sink.emit)))
            is_group = self.group in hook_groups()
            self._scope = loopscope.attach(
                self._model,
                self._optimizer,
                with_hooks=self.group if is_group else None,
                hooks=() if is_group else [Constant()],
                loss=self._real.loss,
                loop="step",
                hook_options=intervals(self.group, self.interval) if is_group and self.interval else {},
                out=self.folder,
                display="none",
                budget=None,
            )
            self._batches = iter(self._scope.batches(self._batch for _ in range(10**6)))

    def _timed(self, emit: Callable[..., None]) -> Callable[..., None]:
        def timed(*arguments: Any, **options: Any) -> None:
            begin = clock()
            emit(*arguments, **options)
            self.write_seconds += clock() - begin

        return timed

    def step(self) -> None:
        """Train one step and keep its CPU time."""
        begin = clock()
        if self._scope is None:
            self._real.loss(self._model, self._batch).backward()
        else:
            self._scope.backward(self._real.loss(self._model, next(self._batches)))
        nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.seconds.append(clock() - begin)

    def skip_first_checks(self) -> None:
        """Count the calls of hooks from 1,000 on, as late in a run, since the first ones get a full check each."""
        if self._scope is not None:
            # Private: an option for this would be of no use to anyone else.
            calls = self._scope._attached.manager.isolation._calls
            calls.update({key: count + 1000 for key, count in calls.items()})

    def close(self) -> float:
        """End the training and return the CPU time of its end."""
        begin = clock()
        if self._scope is not None:
            self._scope.close()
        return clock() - begin


def intervals(group: str, interval: int) -> dict[str, dict[str, Any]]:
    """Return options that set the interval of every hook of a group that has one."""
    options: dict[str, dict[str, Any]] = {}
    for name in hook_groups()[group]:
        if "interval" in signature(HookRegistry.get(name)).parameters:
            options[name] = {"interval": interval}
    return options


@dataclass(frozen=True)
class Measured:
    """One training of a group, step by step in turn with a bare one."""

    costs: list[float]
    """Mean steps as multiples of bare ones."""
    bare_step: float
    first: float
    close: float
    bytes: float
    """Size of the record for each due step."""
    writing: float
    """Time of the sinks for each due step."""


def measure(
    model: str, group: str, rounds: int, *, is_tiny: bool, wrap: Callable[[nn.Module], nn.Module] = as_it_is
) -> Measured:
    """Train a model with a group of hooks, in turn with a bare loop; without ``rounds`` for the first few steps."""
    with ExitStack() as stack, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        bare = Training(model, "bare", stack, is_tiny, wrap=wrap)
        ours = Training(model, group, stack, is_tiny, DUE, wrap)
        gc.collect()  # the imports left a full collection due, which the next few hundred objects would cause
        touch_memory()
        for step in range(1 + DUE * (1 + rounds)):
            if step == 1 + DUE:
                ours.skip_first_checks()
            bare.step()
            ours.step()
        touch_memory()
        end = ours.close()
        size = sum(path.stat().st_size for path in ours.folder.glob("*.jsonl"))
    parts = [slice(1 + DUE * index, 1 + DUE * (index + 1)) for index in range(1 if rounds else 0, 1 + rounds)]
    costs = [cost(ours.seconds[part], statistics.median(bare.seconds[part])) for part in parts]
    due = 2 + rounds
    first = ours.seconds[0] - bare.seconds[0]
    return Measured(costs, statistics.median(bare.seconds), first, end, size / due, ours.write_seconds / due)


def touch_memory() -> None:
    """Use a gigabyte and free it: the host of a virtual machine may take milliseconds for each new megabyte."""
    torch.ones(2**28)


def cost(seconds: list[float], bare: float) -> float:
    """Return the mean step as a multiple of the bare one, if one step in ``PERIOD`` is due; the last of each is."""
    *ordinary, due = seconds
    mean = (statistics.median(ordinary) * (PERIOD - 1) + due) / PERIOD
    return mean / bare


def real_sizes(effort: Effort) -> Iterator[Row]:
    """Compare the steps of each group with those of the bare loop on each model; memory in fresh processes."""
    is_tiny = effort.share <= 0
    for model, real in MODELS.items():
        for group in GROUPS:
            has_bars = (model, group) in BARS
            rounds = 0 if group in SLOW else effort.times(5 if has_bars else 3)
            found = measure(model, group, rounds, is_tiny=is_tiny)
            repeats = [measure(model, group, 1, is_tiny=is_tiny) for _ in range(1, effort.times(5))] if has_bars else []
            first, close = (Spread.of([getattr(run, part) for run in (found, *repeats)]) for part in ("first", "close"))
            bars = BARS.get((model, group), Bars())
            step = f"bare step of {real.title}, {found.bare_step:.2f} s"
            record = f"a step at which all are due; {real.title}"
            yield Row(f"{group}, own CPU time", step, TIMES, Spread.of(found.costs), bars.step)
            yield Row(f"{group}, first step", f"its bare first step; {real.title}", SECONDS, first, bars.first)
            yield Row(f"{group}, close", f"nothing; {real.title}", SECONDS, close, bars.close)
            yield Row(f"{group}, size of the record", record, KILOBYTES, _one(found.bytes))
            yield Row(f"{group}, time of the sinks", record, MILLISECONDS, _one(found.writing))
            peaks = [
                [peak_memory(model, name, is_tiny=is_tiny) for name in ("bare", group)]
                for _ in range(effort.times(5) if has_bars else 1)
            ]
            memory = statistics.median(bare_peak for bare_peak, _ in peaks)
            against = f"bare loop of {real.title}, {memory / 1e6:.0f} MB"
            ratios = Spread.of([peak / bare_peak for bare_peak, peak in peaks])
            yield Row(f"{group}, peak memory", against, TIMES, ratios, bars.memory)


def real_sizes_on_ranks(effort: Effort) -> Iterator[Row]:
    """Compare steps and memory of groups with those of the bare loop under DDP and FSDP2, on two ranks."""
    is_tiny, rounds = effort.share <= 0, effort.times(3)
    for model in ("gpt", "mixtral"):
        for kind, wrap in WRAPS.items():
            title = f"{MODELS[model].title}, {kind}, {RANKS} ranks"
            memory = _peak_on_ranks(model, "bare", wrap, is_tiny=is_tiny)
            for group in ("health", "observers"):
                compute = partial(_costs, model, group, rounds, wrap, is_tiny=is_tiny)
                with tempfile.TemporaryDirectory() as folder:
                    costs, step = on_ranks(compute, Path(folder), RANKS)[0]
                yield Row(f"{group}, own CPU time", f"bare step of {title}, {step:.2f} s", TIMES, Spread.of(costs))
                peak = _peak_on_ranks(model, group, wrap, is_tiny=is_tiny) / memory
                yield Row(
                    f"{group}, peak memory of a rank", f"bare loop of {title}, {memory / 1e6:.0f} MB", TIMES, _one(peak)
                )


def _costs(
    model: str, group: str, rounds: int, wrap: Callable[[nn.Module], nn.Module], *, is_tiny: bool
) -> tuple[list[float], float]:
    found = measure(model, group, rounds, is_tiny=is_tiny, wrap=wrap)
    return found.costs, found.bare_step


def _peak_on_ranks(model: str, group: str, wrap: Callable[[nn.Module], nn.Module], *, is_tiny: bool) -> float:
    with tempfile.TemporaryDirectory() as folder:
        return max(on_ranks(partial(_peak_of, model, group, wrap, is_tiny=is_tiny), Path(folder), RANKS))


def _peak_of(
    model: str, group: str, wrap: Callable[[nn.Module], nn.Module] = as_it_is, *, is_tiny: bool = False
) -> float:
    """Train a few steps and return the peak resident memory of this process, in bytes."""
    with ExitStack() as stack, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        training = Training(model, group, stack, is_tiny, wrap=wrap)
        for _ in range(MEMORY_STEPS):
            training.step()
        training.close()
    return float(peak_resident_bytes())


def peak_memory(model: str, group: str, *, is_tiny: bool) -> float:
    """Return the peak resident memory, in bytes, of a fresh process that trains a few steps."""
    command = [sys.executable, "-m", "tests.benchmarks.real_size_cost", model, group, *["tiny"] * is_tiny]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def _one(value: float) -> Spread:
    return Spread.of([value])


def main(model: str, group: str, size: str = "") -> None:
    """Train a few steps of a group and print the peak memory of the process."""
    torch.set_num_threads(1)
    sys.stdout.write(f"\n{_peak_of(model, group, is_tiny=bool(size))}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
