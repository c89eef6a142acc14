"""What a training shows between the tries of laws: its files, its schedule, and batches of other lengths."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import loopscope
import pytest
import torch
from loopscope.laws.saved_files import SavedFiles
from loopscope.laws.schedules import Schedules
from torch import nn
from torch.optim import SGD, Optimizer, lr_scheduler

RATE = 0.1


def trained(momentum: float = 0.9) -> tuple[nn.Module, SGD, lr_scheduler.LRScheduler]:
    model = nn.Linear(3, 1)
    optimizer = SGD(model.parameters(), RATE, momentum=momentum)
    schedule = lr_scheduler.CosineAnnealingLR(optimizer, 100)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    schedule.step()
    return model, optimizer, schedule


def problem_of(content: Callable[[nn.Module, SGD, Any], Any], path: Path, momentum: float = 0.9) -> str:
    model, optimizer, schedule = trained(momentum)
    files = SavedFiles()
    with files.recording(model, lambda: True):
        torch.save(content(model, optimizer, schedule), path)
    return files.problem()


def of_all(model: nn.Module, optimizer: SGD, schedule: Any) -> Any:
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}


def without_schedule(model: nn.Module, optimizer: SGD, schedule: Any) -> Any:
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def with_step(model: nn.Module, optimizer: SGD, schedule: Any) -> Any:
    return {"model": model.state_dict(), "step": 1}


def with_score(model: nn.Module, optimizer: SGD, schedule: Any) -> Any:
    return {"model": model.state_dict(), "step": 1, "val_loss": 0.5}


def weights(model: nn.Module, optimizer: SGD, schedule: Any) -> Any:
    return model.state_dict()


@pytest.mark.parametrize(
    ("content", "missing"),
    [(without_schedule, "lacks the state of CosineAnnealingLR"), (with_step, "lacks the state of SGD")],
)
def test_files_to_continue_from_are_complete(content: Any, missing: str, tmp_path: Path) -> None:
    assert missing in problem_of(content, tmp_path / "last.pt")


@pytest.mark.parametrize("content", [of_all, with_score, weights])
def test_other_files_lack_nothing(content: Any, tmp_path: Path) -> None:
    assert problem_of(content, tmp_path / "last.pt") == ""


def test_files_of_the_best_model_need_no_optimizer(tmp_path: Path) -> None:
    assert problem_of(with_step, tmp_path / "best.pt") == ""


def course(make: Callable[[Optimizer], lr_scheduler.LRScheduler], updates: int, *, times: int = 1) -> Schedules:
    optimizer = SGD([nn.Parameter(torch.zeros(1))], RATE)
    schedule, schedules = make(optimizer), Schedules()
    schedules.find([optimizer])
    for _ in range(updates):
        optimizer.step()
        schedules.note()
        for _ in range(times):
            schedule.step()
    return schedules


@pytest.mark.parametrize(
    ("make", "updates", "times", "sentence"),
    [
        (partial(lr_scheduler.CosineAnnealingLR, T_max=10), 13, 1, "rises again"),
        (partial(lr_scheduler.StepLR, step_size=5), 30, 1, "within 10 updates"),
        (partial(lr_scheduler.CosineAnnealingLR, T_max=1000), 5, 2, "stepped 2 times for each update"),
    ],
    ids=["cosine", "steps", "twice"],
)
def test_schedules_that_end_before_the_training(make: Any, updates: int, times: int, sentence: str) -> None:
    assert sentence in course(make, updates, times=times).problem()


@pytest.mark.parametrize("length", [40, 1000])
def test_schedules_as_long_as_the_training(length: int) -> None:
    assert course(partial(lr_scheduler.CosineAnnealingLR, T_max=length), 40).problem() == ""


def test_schedules_of_whole_trainings_last() -> None:
    assert course(partial(lr_scheduler.CosineAnnealingLR, T_max=40), 40).outcome().verdict == "holds"
    assert course(partial(lr_scheduler.StepLR, step_size=5), 18).outcome().verdict == "not checked"
    assert Schedules().outcome().verdict == "not checked"


@pytest.mark.parametrize(("warm_up", "verdict"), [(100, "broken"), (40, "holds"), (10, "holds")])
def test_warm_ups_end_before_the_training(warm_up: int, verdict: str) -> None:
    def rate(step: int) -> float:
        return min(1.0, step / warm_up)

    schedules = course(partial(lr_scheduler.LambdaLR, lr_lambda=rate), 40)
    assert schedules.outcome(is_planned=True).verdict == verdict
    # Without a plan it may be a short run of a script that is tried out.
    assert schedules.outcome().verdict == ("holds" if verdict == "holds" else "not checked")


@pytest.mark.parametrize(("is_complete", "verdict"), [(False, "broken"), (True, "not checked")])
def test_files_after_the_tries_count(is_complete: bool, verdict: str, tmp_path: Path) -> None:
    model, optimizer, schedule = trained()
    options = {"laws": {"only": ["checkpoint_is_complete"], "steps": [1]}}
    scope = loopscope.attach(
        model, optimizer, out=tmp_path / "run", display="none", hooks=["laws"], hook_options=options
    )
    with scope:
        for _ in range(6):
            optimizer.zero_grad()
            model(torch.ones(4, 3)).sum().backward()
            optimizer.step()
            schedule.step()
        torch.save((of_all if is_complete else without_schedule)(model, optimizer, schedule), tmp_path / "last.pt")
    results = json.loads((tmp_path / "run" / "laws.json").read_text())
    assert results["laws"][0]["verdict"] == verdict


@pytest.mark.longer
@pytest.mark.parametrize(("divisor", "verdict"), [(8, "broken"), (0, "holds")])
def test_short_batches_have_their_own_divisor(divisor: int, verdict: str, tmp_path: Path) -> None:
    """A divisor of 0 stands for the number of rows."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = SGD(model.parameters(), 0.01)
    options = {"laws": {"only": ["halves_make_a_whole"], "steps": [1]}}
    scope = loopscope.attach(
        model, optimizer, out=tmp_path / "run", display="none", hooks=["laws"], hook_options=options
    )
    with scope:
        for x in torch.randn(20, 3).split(8):
            loss = (model(x)[:, 0] - x.sum(1)).square().sum() / (divisor or len(x))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        (result,) = scope.check()
    assert result["verdict"] == verdict


def linear(optimizer: Optimizer, *, warmup: int = 2, length: int) -> lr_scheduler.LRScheduler:
    """Return a schedule that reaches zero, as those of transformers: its length is in a function alone."""
    return lr_scheduler.LambdaLR(
        optimizer, lambda step: min(step / warmup, max(0.0, (length - step) / (length - warmup)))
    )


def in_sequence(optimizer: Optimizer, length: int) -> lr_scheduler.LRScheduler:
    parts = [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=5), lr_scheduler.CosineAnnealingLR(optimizer, length)]
    return lr_scheduler.SequentialLR(optimizer, parts, [5])


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (partial(linear, length=15), "within 15 updates, and 45 have followed"),
        (partial(linear, warmup=500, length=600), "still raises the learning rate"),
        (partial(lr_scheduler.StepLR, step_size=5), "within 10 updates"),
        (partial(lr_scheduler.CosineAnnealingLR, T_max=40), "rises again"),
    ],
)
def test_plans_show_schedules_that_end_early(make: Any, sentence: str) -> None:
    outcome = course(make, 8).planned_outcome(60)
    assert outcome is not None
    assert outcome.verdict == "broken"
    assert sentence in outcome.evidence
    assert "by the plan of 60 updates" in outcome.evidence


@pytest.mark.parametrize(
    "make",
    [
        partial(linear, length=60),
        partial(linear, length=200),
        partial(in_sequence, length=55),
        partial(lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=60),
        partial(lr_scheduler.CosineAnnealingWarmRestarts, T_0=7),
        partial(lr_scheduler.ExponentialLR, gamma=0.99),
    ],
)
def test_plans_show_schedules_that_last(make: Any) -> None:
    schedules = course(make, 8)
    outcome = schedules.planned_outcome(60)
    assert outcome is not None
    assert outcome.verdict == "holds"
    assert "in 60 updates" in outcome.evidence


def test_plans_decide_nothing_without_steps() -> None:
    """A schedule that is stepped per epoch, and one that follows the loss."""
    assert course(partial(linear, length=20), 8, times=0).planned_outcome(60) is None
    assert course(partial(lr_scheduler.StepLR, step_size=5), 8).planned_outcome(8) is None


def test_plans_leave_the_schedule_as_it_is() -> None:
    optimizer = SGD([nn.Parameter(torch.zeros(1))], 0.1)
    schedule, schedules = in_sequence(optimizer, 55), Schedules()
    schedules.find([optimizer])
    for _ in range(8):
        optimizer.step()
        schedules.note()
        schedule.step()
    state, rate = schedule.state_dict(), optimizer.param_groups[0]["lr"]
    assert schedules.planned_outcome(60) is not None
    assert (schedule.last_epoch, optimizer.param_groups[0]["lr"]) == (state["last_epoch"], rate)
