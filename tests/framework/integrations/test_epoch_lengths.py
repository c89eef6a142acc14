"""Epochs whose number of steps changes: resumed with the remaining batches, or by a changing accumulation."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import loopscope
import pytest
import torch
from lightning.pytorch.callbacks import Callback, GradientAccumulationScheduler, StochasticWeightAveraging
from loopscope.errors import UnsuitableError, UsageError
from loopscope.hooks import ENDLESS
from loopscope.integrations.epoch_plan import EpochPlan
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.framework.integrations.test_lightning import fit
from tests.support.cases import some_of

pytestmark = [pytest.mark.trainer, pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")]
SWA = {"weight_average": {"averages": "swa", "interval": 1, "swa_interval": 1, "evaluate": False}}
DATA = TensorDataset(torch.randn(40, 4), torch.randint(3, (40,)))
REMAINING: dict[str, Any] = {
    "a loader": lambda first: DataLoader(torch.utils.data.Subset(DATA, range(4 * first, 40)), 4),
    "a list": lambda first: list(DataLoader(DATA, 4))[first:],
    "an iterator": lambda first: itertools.islice(DataLoader(DATA, 4), first, None),
}


def train(out: Path, kind: str, stored: dict[str, Any] | None, stop: int = 0) -> Any:
    """Train four epochs of ten steps; resume with the remaining batches, or return the state after ``stop`` steps."""
    model = nn.Linear(4, 3)
    optimizer, done = torch.optim.SGD(model.parameters(), 0.1), stored["done"] if stored else 0
    options = {"hook_options": SWA, "length": 4, "display": "none"}
    with loopscope.attach(model, optimizer, hooks=["weight_average"], out=out, **options) as scope:
        if stored:
            scope.load_state_dict(stored["scope"])
        for epoch in range(done // 10, 4):
            for batch in scope.batches(REMAINING[kind](done - 10 * epoch) if done % 10 else DataLoader(DATA, 4)):
                scope.backward(nn.functional.cross_entropy(model(batch[0]), batch[1]))
                optimizer.step()
                done += 1
                if done == stop:
                    return {"scope": scope.state_dict(), "done": done}
    rows = [json.loads(line) for line in (out / f"{out.name}.jsonl").read_text().splitlines()]
    ends = [(row["epoch"], row["step"]) for row in rows if row["hook_point"] == "POST_EPOCH"]
    return ends, [row["weight_average/swa_samples"] for row in rows if "weight_average/swa_samples" in row]


@pytest.mark.parametrize("stop", some_of([5, 3, 10, 13, 27], 5))
@pytest.mark.parametrize("kind", REMAINING)
def test_epoch_ends_after_its_remaining_batches(tmp_path: Path, kind: str, stop: int) -> None:
    """A run that resumes within an epoch has the epochs and the schedules of the uninterrupted run."""
    whole = train(tmp_path / "whole", kind, None)
    assert whole == ([(0, 10), (1, 20), (2, 30), (3, 40)], [1, 11])
    stored = train(tmp_path / "parts", kind, None, stop)
    assert train(tmp_path / "parts", kind, stored) == whole


class Changing(Callback):
    """Changes the accumulation after the first epoch."""

    def __init__(self, first: int, rest: int) -> None:
        self.counts = first, rest

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        trainer.accumulate_grad_batches = self.counts[trainer.current_epoch > 0]


@pytest.mark.some_rows(3)
@pytest.mark.parametrize("kind", ["scheduler", "callback"])
@pytest.mark.parametrize("counts", [(1, 5), (5, 1), (1, 1)])
def test_average_starts_at_share_of_real_steps(tmp_path: Path, kind: str, counts: tuple[int, int]) -> None:
    """SWA covers the last quarter of the steps, although Lightning's accumulation changes after the first epoch."""
    first, rest = counts
    callback = Changing(*counts) if kind == "callback" else GradientAccumulationScheduler({0: first, 1: rest})
    choices = {"hook_options": SWA}
    _, scope, made = fit(tmp_path, ["weight_average"], callbacks=[callback], choices=choices, max_epochs=8)
    total = 5 // first + 7 * (5 // rest)
    assert made.global_step == total
    wanted = [step for step in range(1, total + 1) if step >= 0.75 * total]
    assert scope.last_metrics()["weight_average/swa_samples"] == len(wanted)


def test_window_is_compared_with_planned_steps(tmp_path: Path) -> None:
    """Lightning's schedule of the accumulation is known before the first step."""
    options = {"choices": {"hook_options": {"loss_spikes": {"window": 12}}}, "max_epochs": 4}
    fit(tmp_path, ["loss_spikes"], callbacks=[GradientAccumulationScheduler({0: 5, 1: 1})], **options)
    with pytest.raises(UnsuitableError, match="the run has only 8 steps"):
        fit(tmp_path / "b", ["loss_spikes"], callbacks=[GradientAccumulationScheduler({0: 1, 1: 5})], **options)


def test_hooks_of_whole_batches_are_refused(tmp_path: Path) -> None:
    """They need the batch of a step before it is complete: with a schedule at the start, otherwise at the change."""
    with pytest.raises(UnsuitableError, match="accumulate_grad_batches=1"):
        fit(tmp_path, ["hessian"], callbacks=[GradientAccumulationScheduler({0: 1, 1: 5})])
    with pytest.raises(UsageError, match="accumulate_grad_batches has become 5"):
        fit(tmp_path / "b", ["hessian"], callbacks=[Changing(1, 5)])


def test_pass_for_statistics_has_no_steps(tmp_path: Path) -> None:
    """StochasticWeightAveraging ends with a pass over the data for BatchNorm's statistics, which hooks do not see."""

    def averaged(path: Path, *hooks: str) -> Any:
        return fit(path, hooks, callbacks=[StochasticWeightAveraging(1e-2, swa_epoch_start=1)], max_epochs=3)

    bare, *_ = averaged(tmp_path / "bare")
    rows, scope, _ = averaged(tmp_path, "batch_rows", "norms")
    assert rows == bare
    assert json.loads((scope.folder / "summary.json").read_text())["steps"] == 15


@pytest.mark.parametrize("given", ["list", "iterator"])
@pytest.mark.parametrize("counts", [[1, 5, 5, 5, 5, 5], [5, 1, 1, 1], [2, 2, 2]])
def test_custom_loop_plans_by_what_happens(tmp_path: Path, given: str, counts: list[int]) -> None:
    """The loop completes its steps itself, so that epochs have other lengths than announced."""
    model, data = nn.Linear(4, 3), [*DataLoader(DATA, 4)]
    optimizer, total = torch.optim.SGD(model.parameters(), 0.1), sum(10 // count for count in counts)
    options = {"hook_options": SWA, "length": len(counts), "accumulate": 5, "display": "none", "out": tmp_path / "run"}
    with loopscope.attach(model, optimizer, hooks=["weight_average"], **options) as scope:
        for count in counts:
            batches: Iterator[Any] = scope.batches(data if given == "list" else iter(data))
            for place, batch in enumerate(batches, 1):
                scope.backward(nn.functional.cross_entropy(model(batch[0]), batch[1]), last=place % count == 0)
                if place % count == 0:
                    optimizer.step()
    wanted = [step for step in range(1, total + 1) if step >= 0.75 * total]
    assert abs(scope.last_metrics()["weight_average/swa_samples"] - len(wanted)) <= 1


def test_plan_follows_the_lengths_of_epochs() -> None:
    plan = EpochPlan()
    plan.begin_epoch(0, 0, None)
    assert plan.steps_until(3) == ENDLESS
    plan.begin_epoch(0, 0, 10)
    assert plan.steps_until(3) == 30
    plan.end_epoch(0, 4)
    plan.begin_epoch(1, 4, 10)  # announced as before, so it is expected to be as long as the first
    assert plan.steps_until(3) == 12
    plan.begin_epoch(1, 4, 8)
    copied = EpochPlan()
    copied.load_state_dict(plan.state_dict())
    assert copied.steps_until(3) == 20
    copied.limit = 15
    assert copied.steps_until(3) == 15
