"""The training in loopscope's loop, with hooks."""

import warnings
from collections.abc import Iterator, Sequence

from loopscope.data import Batch, Loader
from loopscope.engine import HookManager
from loopscope.errors import RunNotice
from loopscope.hooks import (
    HookPoint,
    InterventionHook,
    MetricInfo,
    Metrics,
    ModelDataContext,
    RunDataContext,
    RunInfo,
    TrainingHook,
)
from loopscope.loops import epoch_loop
from loopscope.sinks import JSONLSink
from loopscope.state import RandomStreams, TrainingState
from loopscope.training import TrainingTask
from loopscope.training_hooks.averaging import WeightAverage
from loopscope.training_hooks.clipping import GradClip
from torch.nn import functional

from tests.benchmarks.others.work import DECAY, MAX_NORM, Asked, Callback, Data, Seen, Work, norm_of_each

LOGS = "a JSONL file"
CLIPS, AVERAGES, NORMS = "hook grad_clip", "hook weight_average, every step", "an observer"


class HearsAll(TrainingHook):
    """An observer at every point that does nothing."""

    name = "receives_all_events"
    hook_points = frozenset(HookPoint)

    def compute(self, ctx: RunDataContext) -> Metrics:
        return {}

    def describe_metrics(self) -> Sequence[MetricInfo]:
        return []


class Observes(TrainingHook):
    """An observer that calls a callback after every step."""

    name = "observes"
    hook_points = frozenset({HookPoint.POST_STEP})

    def __init__(self, callback: Callback, number: int = 0) -> None:
        self._callback = callback
        self.name = f"observes_{number}"

    def compute(self, ctx: RunDataContext) -> Metrics:
        return self._callback(Seen(ctx.model, ctx.loss, ctx.lr))

    def describe_metrics(self) -> Sequence[MetricInfo]:
        return []


class Intervenes(InterventionHook):
    """The same as an intervention, which is rolled back."""

    name = "intervenes"
    hook_points = frozenset({HookPoint.POST_STEP})

    def __init__(self, callback: Callback) -> None:
        self._callback = callback

    def intervene(self, run_ctx: RunDataContext, model_ctx: ModelDataContext) -> Metrics:
        return self._callback(Seen(run_ctx.model, run_ctx.loss, run_ctx.lr))

    def describe_metrics(self) -> Sequence[MetricInfo]:
        return []


class Loaded(Loader):
    """A loader of the batches for loopscope's loop."""

    def __init__(self, data: Data) -> None:
        self._data = data

    def batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        return iter(self._data)

    def __len__(self) -> int:
        return len(self._data)

    def shuffled(self, seed: int) -> Loader:
        return self


def train(work: Work, asked: Asked) -> None:
    """Train, with the requested extras."""
    _train(work, hooks(asked))


def train_with_interventions(work: Work, asked: Asked) -> None:
    """Train with unrestricted callbacks that are rolled back."""
    _train(work, [Intervenes(callback) for callback in asked.callbacks])


def hooks(asked: Asked) -> list[TrainingHook]:
    """Return the hooks for the requested extras."""
    callbacks = [*asked.callbacks, *[norm_of_each] * asked.norms]
    found: list[TrainingHook] = [Observes(callback, number) for number, callback in enumerate(callbacks)]
    found += [HearsAll()] * asked.receives_all_events
    found += [GradClip(max_norm=MAX_NORM)] * asked.clips
    average = {"decay": DECAY, "interval": 1, "averages": "ema", "evaluate": False}
    return found + [WeightAverage(**average)] * asked.averages


def _train(work: Work, asked: Sequence[TrainingHook]) -> None:
    model, optimizer = work.model, work.optimizer
    task = TrainingTask(
        model, optimizer, Loaded(work.data), lambda model, batch: functional.cross_entropy(model(batch[0]), batch[1])
    )
    task.length = work.epochs
    sinks = [JSONLSink()] if asked else []
    run = RunInfo(
        experiment="others", strategy="only", output_dir=work.folder, task=task, loop="epoch", seed=1,
        optimizer_class=type(optimizer),
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RunNotice)
        manager = HookManager(asked, task, TrainingState(model, optimizer, RandomStreams(1)), sinks=sinks)
        manager.start(run)
        epoch_loop(task, manager)
        manager.end("completed")
