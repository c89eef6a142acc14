"""Runs of the cases, with their digests, dispatched points and metrics."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from loopscope.data import TensorLoader, random_order
from loopscope.engine import HookManager
from loopscope.engine.listeners import Listener
from loopscope.hooks import HookPoint, MetricSink, RunInfo, Series, TrainingHook, treatments
from loopscope.loops import NoPauses, NoProgress, epoch_loop, step_loop
from loopscope.state import LoopState, RandomStreams, TrainingState, seed_everything, without_on_demand
from loopscope.training import TrainingTask
from torch import Tensor

from tests.support.models import (
    BATCH,
    LOOPS,
    MODELS,
    OPTIMIZERS,
    ROWS,
    STEPS_PER_EPOCH,
    TokenConfig,
    data_for,
    drawing_evaluation,
    mean_loss,
)


@dataclass
class Tally:
    """Additional state of a strategy: a plain number and a tensor."""

    count: int = 0
    table: Tensor = field(default_factory=lambda: torch.arange(4.0))

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "table": self.table}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.count = state["count"]
        self.table = state["table"]


@dataclass(frozen=True)
class Case:
    """One row of the matrix of runs: model, optimizer, loop."""

    model: str = "batchnorm_mlp"
    optimizer: str = "adamw_foreach"
    loop: str = "epoch"

    def __str__(self) -> str:
        return f"{self.model}-{self.optimizer}-{self.loop}"


CASES = [Case(model, optimizer, loop) for loop in LOOPS for model in MODELS for optimizer in OPTIMIZERS]


def build(
    case: Case, *, steps: int = STEPS_PER_EPOCH, device: str = "cpu", **options: Any
) -> tuple[TrainingTask, TrainingState]:
    """Build a small run, with the same bytes at every call. ``options`` are fields of :class:`TrainingTask`."""
    seed_everything(3)
    model = MODELS[case.model]().to(device)
    optimizer = OPTIMIZERS[case.optimizer](model.parameters())
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)
    data = tuple(tensor.to(device) for tensor in data_for(case.model))
    settings: dict[str, Any] = {
        "loader": TensorLoader(data, BATCH, random_order(ROWS, 1)),
        "compute_loss": mean_loss,
        "evaluate": drawing_evaluation(data),
        "scheduler": scheduler,
        "length": steps if case.loop == "step" else -(-steps // STEPS_PER_EPOCH),
        "eval_every": 2 if case.loop == "step" else 1,
        "snapshot_every": 2,
        "log_every": 2,
        "config": TokenConfig(),
    }
    task = TrainingTask(model, optimizer, **(settings | options))
    streams = RandomStreams(7, owned=[torch.Generator().manual_seed(4)])
    return task, TrainingState(model, optimizer, streams, scheduler=scheduler, extras={"strategy": Tally()})


class DigestTrace(NoProgress):
    """Records a digest of the training state after every step."""

    def __init__(self, state: TrainingState) -> None:
        self._state = state
        self.digests: list[dict[str, int]] = []

    def step(self, loop: LoopState) -> None:
        self.digests.append(without_on_demand(self._state.digest()))


@dataclass
class RecordingSink(MetricSink):
    """A sink that keeps everything that it receives."""

    name: str = "recording"
    emitted: list[tuple[dict[str, Any], int, HookPoint, int]] = field(default_factory=list)
    events: list[str] = field(default_factory=list)

    def set_run_context(self, run: RunInfo) -> None:
        self.events.append("start")

    def emit(self, metrics: Mapping[str, Any], epoch: int, hook_point: HookPoint, *, step: int) -> None:
        self.emitted.append((dict(metrics), epoch, hook_point, step))

    def flush(self) -> None:
        self.events.append("flush")

    def close(self, status: str) -> None:
        self.events.append(f"close {status}")

    def rows(self, hook: str = "") -> list[tuple[str, HookPoint, int, Any]]:
        """List (metric, point, step, value), series unrolled, of one hook or of all, sorted."""
        unrolled_rows: list[tuple[str, HookPoint, int, Any]] = []
        for metrics, _, point, step in self.emitted:
            for name, value in metrics.items():
                if name.startswith(hook):
                    series = value if isinstance(value, Series) else Series([step], [value])
                    unrolled_rows += [(name, point, *pair) for pair in zip(series.steps, series.values, strict=True)]
        return sorted(unrolled_rows, key=lambda row: row[:3])


class Saving(NoPauses):
    """Calls ``save`` every ``every`` epochs (step loop: steps), isolated like a checkpoint; 0 disables it."""

    def __init__(self, manager: HookManager, every: int, save: Callable[[], None]) -> None:
        self._manager = manager
        self._every = every
        self._save = save

    def pause(self, loop: LoopState, *, unit_ended: bool) -> None:
        completed = loop.epoch if self._manager.counts_epochs else loop.step
        if unit_ended and self._every and completed % self._every == 0:
            self._manager.run_isolated("checkpoint", self._save)


class WatchedManager(HookManager):
    """A manager whose calls of the hooks at a hook point go through a method that tests override."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        call_hooks = self.call_hooks

        def watched(point: HookPoint, listeners: Sequence[Listener]) -> None:
            self.watch_call(point, partial(call_hooks, point, listeners))

        self.call_hooks = watched

    def watch_call(self, point: HookPoint, call: Callable[[], None]) -> None:
        """Make the ``call`` of the hooks at a point."""
        call()


@dataclass
class Run:
    """The result of a run: its digests after every step and at the end, and its components."""

    case: Case
    task: TrainingTask
    state: TrainingState
    manager: HookManager
    sink: RecordingSink
    digests: list[dict[str, int]]
    saved: list[tuple[int, dict[str, int]]]
    """The step and the digest of every checkpoint."""
    error: Exception | None
    final: dict[str, int] = field(default_factory=dict)
    """The digest at the end. It includes the random streams of the process, from which other code draws later."""

    @property
    def checkpoints(self) -> int:
        return len(self.saved)


def train(
    case: Case,
    hooks: Sequence[TrainingHook] = (),
    *,
    steps: int = STEPS_PER_EPOCH,
    audit: bool = False,
    on_error: str = "raise",
    sinks: Sequence[MetricSink] = (),
    raises: type[Exception] | tuple[type[Exception], ...] = (),
    manager_class: type[HookManager] = HookManager,
    save: Callable[[Run], None] = lambda run: None,
    every_step: bool = True,
    reference_weights: Mapping[str, Tensor] | None = None,
    offload_state: bool = False,
    introduce: Callable[[TrainingTask, TrainingState], None] = lambda task, state: None,
    checkpoint_every: int = 0,
    device: str = "cpu",
    guardian_device: torch.device | None = None,
    **options: Any,
) -> Run:
    """Run a loop with ``hooks`` and return an error of the types in ``raises``; other errors propagate.

    ``audit`` compares the whole state around every call of a hook, as the contract tests of all hooks do; it takes a
    third of the time of a short run. ``save`` is called at every checkpoint; ``every_step`` digests the state after
    every step; ``introduce`` receives task and state before the training; ``options`` are fields of the task.
    """
    task, state = build(case, steps=steps, device=device, **options)
    introduce(task, state)
    sink = RecordingSink()
    manager = manager_class(
        hooks,
        task,
        state,
        loop=case.loop,
        sinks=[sink, *sinks],
        on_error=on_error,
        audit=audit,
        reference_weights=reference_weights,
        offload_state=offload_state,
        guardian_device=guardian_device,
    )
    run = Run(case, task, state, manager, sink, [], [], None)

    def checkpoint() -> None:
        run.saved.append((state.loop.step, without_on_demand(state.digest())))
        save(run)

    trace = DigestTrace(state) if every_step else NoProgress()
    run.digests = trace.digests if isinstance(trace, DigestTrace) else []
    loop = epoch_loop if case.loop == "epoch" else step_loop
    try:
        manager.start(replace(run_info(task, manager, case.loop), reference_weights=reference_weights))
        loop(task, manager, progress=trace, pauses=Saving(manager, checkpoint_every, checkpoint))
    except raises as error:
        run.error = error
    finally:
        try:
            manager.end("completed" if run.error is None else "failed")
        except raises as error:
            run.error = run.error or error
    run.final = without_on_demand(state.digest())
    return run


def run_info(task: TrainingTask, manager: HookManager, loop: str) -> RunInfo:
    return RunInfo(
        experiment="support",
        strategy="only",
        output_dir=Path("unused"),
        task=task,
        loop=loop,
        seed=7,
        optimizer_class=type(task.optimizer),
        metric_infos=manager.hooks.metric_infos(),
        treatments=treatments(manager.hooks),
    )


@cache
def bare_run(case: Case, steps: int = STEPS_PER_EPOCH) -> tuple[list[dict[str, int]], dict[str, int]]:
    """Return the digests after every step, and at the end, of the run without hooks."""
    run = train(case, steps=steps, audit=False)
    return run.digests, run.final


def assert_same_bytes(run: Run, case: Case, steps: int = STEPS_PER_EPOCH) -> None:
    """Fail unless a run has, after every step and at the end, the bytes of the run without hooks."""
    digests, final = bare_run(case, steps)
    assert len(run.digests) == len(digests)
    for number, (expected, actual) in enumerate(zip(digests, run.digests, strict=True), start=1):
        assert not differences(expected, actual), f"after step {number}"
    assert not differences(final, run.final), "at the end"


def differences(before: Mapping[str, int], after: Mapping[str, int]) -> list[str]:
    return sorted(name for name in {**before, **after} if before.get(name) != after.get(name))
