"""The time of a step by phase, in every kind of loop, by a clock that only the parts of a training advance."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import loopscope
import pytest
import torch
from loopscope.doctor import WORDS
from loopscope.engine import HookManager
from loopscope.hooks import HookPoint
from loopscope.loops import epoch_loop, step_loop
from loopscope.state import RandomStreams, TrainingState
from loopscope.training import PHASES, TrainingTask, step_clock
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, dataloader

from tests.support import SpyHook, at

LOADING, FORWARD, BACKWARD, OTHER, UPDATE, HOOK, BETWEEN = 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0
STEPS, EPOCHS = 8, 3
COUNTED = STEPS * EPOCHS - 10
EXPECTED = {"data": LOADING, "forward": FORWARD, "backward": BACKWARD, "update": UPDATE, "evaluation": 0.0}
EXPECTED |= {"hooks": HOOK, "between": BETWEEN, "other": OTHER}
NEXT = dataloader._BaseDataLoaderIter.__next__


class Time:
    """A clock that stands still unless a part of the training advances it."""

    now = 0.0

    def advance(self, seconds: float) -> None:
        self.now += seconds

    def __call__(self) -> float:
        return self.now


TIME = Time()


@pytest.fixture(autouse=True)
def _advanced_by_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_clock, "perf_counter", TIME)


class Rows(Dataset[tuple[Tensor, Tensor]]):
    """Rows that take time to load."""

    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        TIME.advance(LOADING)
        return torch.full((1, 3), float(index)), torch.ones(1, 1)


class Model(nn.Linear):
    """A model whose passes take time."""

    def __init__(self) -> None:
        super().__init__(3, 1)
        self.bias.register_hook(lambda gradient: TIME.advance(BACKWARD))

    def forward(self, inputs: Tensor) -> Tensor:
        TIME.advance(FORWARD)
        return super().forward(inputs)


class Descent(torch.optim.SGD):
    """An optimizer whose step takes time."""

    def step(self, closure: Any = None) -> Any:
        TIME.advance(UPDATE)
        return super().step(closure)


class Waiting(at(SpyHook, HookPoint.POST_STEP)):  # type: ignore[misc]
    """A hook that takes time at every step."""

    def __init__(self) -> None:
        super().__init__(lambda context: TIME.advance(HOOK))


def unedited(scope: Any, model: Model, optimizer: Descent, loader: Any) -> None:
    for inputs, targets in loader:
        (model(inputs) - targets).square().mean().backward()
        TIME.advance(OTHER)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        TIME.advance(BETWEEN)


def reporting(scope: Any, model: Model, optimizer: Descent, loader: Any) -> None:
    for inputs, targets in scope.batches(loader):
        scope.backward((model(inputs) - targets).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        TIME.advance(BETWEEN)


def trained(folder: Path, epoch: Callable[..., None], **options: Any) -> dict[str, Any]:
    """Train by a custom loop, and return the summary of the run."""
    model = Model()
    optimizer, loader = Descent(model.parameters(), 1e-3), DataLoader(Rows(), batch_size=None)
    given: dict[str, Any] = {"hooks": [Waiting()], "out": folder, "display": "none"}
    with loopscope.attach(model, optimizer, **given | options) as scope:
        for _ in range(EPOCHS):
            epoch(scope, model, optimizer, loader)
        TIME.advance(1000)  # after the last step
    content: dict[str, Any] = json.loads((folder / "summary.json").read_text("utf-8"))
    return content


def test_time_of_an_unedited_loop_is_split(tmp_path: Path) -> None:
    """Only the loader, the passes, the update and the hooks have their times; the loader's method is restored."""
    assert trained(tmp_path, unedited)["step_time"] == {"steps": COUNTED, "device": "cpu", "seconds": EXPECTED}
    assert dataloader._BaseDataLoaderIter.__next__ is NEXT


def test_time_of_a_loop_with_calls_is_split(tmp_path: Path) -> None:
    """The time between two steps is that of the loop's body, and no part of the wait for data."""

    def body(*inputs: Any) -> None:
        reporting(*inputs)

    # Until the next batch is asked for, the loop is between two steps.
    assert trained(tmp_path, body)["step_time"]["seconds"] == EXPECTED | {"other": 0.0}


@pytest.mark.parametrize("isolate", [True, False])
def test_evaluations_are_not_waits_for_data(isolate: bool, tmp_path: Path) -> None:
    def epoch(scope: Any, model: Model, optimizer: Descent, loader: Any) -> None:
        reporting(scope, model, optimizer, loader)
        scope.evaluate(lambda: [model(inputs) for inputs, _ in loader] and {"val_loss": 1.0})

    seconds = trained(tmp_path, epoch, isolate_evaluation=isolate)["step_time"]["seconds"]
    # The last one follows the last step.
    assert seconds["evaluation"] == pytest.approx((STEPS * (LOADING + FORWARD)) / COUNTED)
    assert seconds["data"] == LOADING


def test_unedited_evaluations_are_no_steps(tmp_path: Path) -> None:
    """From the first pass without gradients to the next step, the time is that of an evaluation."""

    def epoch(scope: Any, model: Model, optimizer: Descent, loader: Any) -> None:
        unedited(scope, model, optimizer, loader)
        with torch.no_grad():
            for inputs, _ in loader:
                model(inputs)

    seconds = trained(tmp_path, epoch)["step_time"]["seconds"]
    # The first row of the evaluation is loaded before its first pass, that of the next epoch after its last one.
    assert seconds["evaluation"] == pytest.approx(STEPS * (LOADING + FORWARD) / COUNTED)
    assert seconds["data"] == LOADING


def test_accumulated_passes_have_their_times(tmp_path: Path) -> None:
    def epoch(scope: Any, model: Model, optimizer: Descent, loader: Any) -> None:
        for inputs, targets in loader:
            for _ in range(2):
                (model(inputs) - targets).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    seconds = trained(tmp_path, epoch)["step_time"]["seconds"]
    assert (seconds["forward"], seconds["backward"]) == (2 * FORWARD, 2 * BACKWARD)


def test_loaders_of_hooks_are_time_of_hooks(tmp_path: Path) -> None:
    def load(context: Any) -> None:
        for _ in DataLoader(Rows(), batch_size=None):
            pass

    hook = at(SpyHook, HookPoint.PRE_UPDATE)(load)
    seconds = trained(tmp_path, unedited, hooks=[hook])["step_time"]["seconds"]
    assert seconds == EXPECTED | {"hooks": STEPS * LOADING}


def test_few_steps_and_bare_loops_have_no_times(tmp_path: Path) -> None:
    """The first 10 steps do not count, and a loop of which only the updates are seen has no phases."""

    def few(scope: Any, model: Model, optimizer: Descent, loader: Any) -> None:
        unedited(scope, model, optimizer, [*loader][:1])

    def bare(scope: Any, model: Model, optimizer: Descent, loader: Any) -> None:
        for _ in range(STEPS):
            model.weight.grad = torch.ones_like(model.weight)
            optimizer.step()

    assert trained(tmp_path / "few", few)["step_time"] == {}
    assert trained(tmp_path / "bare", bare)["step_time"] == {}


@pytest.mark.parametrize("loop", ["epoch", "step"])
def test_loops_of_experiments_have_the_same_phases(loop: str) -> None:
    class Batches:
        def __len__(self) -> int:
            return STEPS

        def batches(self, epoch: int, start: int = 0) -> Any:
            rows = Rows()
            yield from (rows[index] for index in range(start, STEPS))

    model = Model()
    optimizer = Descent(model.parameters(), 1e-3)
    length = EPOCHS if loop == "epoch" else STEPS * EPOCHS

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return (model(batch[0]) - batch[1]).square().mean()

    task = TrainingTask(model, optimizer, Batches(), loss, length=length, eval_every=0)  # type: ignore[arg-type]
    manager = HookManager([Waiting()], task, TrainingState(model, optimizer, RandomStreams(0)), loop=loop)
    (epoch_loop if loop == "epoch" else step_loop)(task, manager)
    manager.end("completed")
    assert manager.profiler.clock.report()["seconds"] == EXPECTED | {"other": 0.0, "between": 0.0}


@pytest.mark.trainer
def test_trainer_of_hugging_face_has_the_phases(tmp_path: Path) -> None:
    from tests.framework.integrations import hf_trainers as hf

    trainer = hf.trainer(tmp_path, num_train_epochs=4)
    trainer.model.register_forward_pre_hook(lambda *_: TIME.advance(FORWARD))
    trainer.model.lm_head.weight.register_hook(lambda _: TIME.advance(BACKWARD))
    scope = loopscope.attach(trainer, hooks=[Waiting()], display="none", out=tmp_path / "run")
    trainer.train()
    seconds = json.loads((scope.folder / "summary.json").read_text("utf-8"))["step_time"]["seconds"]
    assert (seconds["forward"], seconds["backward"], seconds["hooks"]) == (FORWARD, BACKWARD, HOOK)


@pytest.mark.trainer
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning", "ignore:.*:UserWarning:lightning")
def test_trainer_of_lightning_has_the_phases(tmp_path: Path) -> None:
    from tests.framework.integrations import test_lightning as pl

    class Timed(pl.Classifier):
        def training_step(self, batch: Any, index: int) -> Any:
            TIME.advance(FORWARD)
            return super().training_step(batch, index)

        def on_before_backward(self, loss: Tensor) -> None:
            loss.register_hook(lambda _: TIME.advance(BACKWARD))

    trainer = pl.trainer(tmp_path, max_epochs=4)
    scope = loopscope.attach(trainer, hooks=[Waiting()], display="none", out=tmp_path / "run")
    trainer.fit(Timed(), DataLoader([(torch.ones(4), 1)] * 20, collate_fn=loaded, batch_size=4))
    seconds = json.loads((scope.folder / "summary.json").read_text("utf-8"))["step_time"]["seconds"]
    found = tuple(seconds[name] for name in ("data", "forward", "backward", "hooks"))
    assert found == (LOADING, FORWARD, BACKWARD, HOOK)


def loaded(rows: list[Any]) -> Any:
    """Collate rows, which takes time."""
    TIME.advance(LOADING)
    return torch.utils.data.default_collate(rows)


def test_every_phase_has_words() -> None:
    assert tuple(WORDS) == PHASES


def test_memory_is_recorded_unless_profiled(tmp_path: Path) -> None:
    """A profile resets the peaks of memory, so they are not those of the run."""
    assert trained(tmp_path / "run", unedited)["peak_memory"]["host"] > 1e7
    assert trained(tmp_path / "profiled", unedited, profile_hooks=True)["peak_memory"] == {}
