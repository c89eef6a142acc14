"""All schedulers and optimizers of torch: resumed and rolled back, they train like a run that was never stopped."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from loopscope.checkpoints.content import load_checkpoint, save_checkpoint
from loopscope.isolation import StateCopy
from loopscope.state import RandomStreams, TrainingState
from torch import nn
from torch.optim import lr_scheduler as schedulers
from torch.optim.swa_utils import SWALR

from tests.support.odd_objects import Schedule

pytestmark = [
    pytest.mark.guarantee("resumed-runs-are-identical"),
    pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler", "ignore:The epoch parameter in"),
]
multistep = partial(schedulers.MultiStepLR, milestones=[1, 3, 3, 5], gamma=0.5)
warmup = partial(schedulers.LinearLR, start_factor=0.2, total_iters=3)


def sequence(*makers: Callable[..., Any], milestone: int = 2) -> Callable[..., Any]:
    return lambda optimizer: schedulers.SequentialLR(optimizer, [make(optimizer) for make in makers], [milestone])


def chain(*makers: Callable[..., Any]) -> Callable[..., Any]:
    return lambda optimizer: schedulers.ChainedScheduler([make(optimizer) for make in makers], optimizer)


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": partial(schedulers.LambdaLR, lr_lambda=lambda step: 1 / (1 + step)),
    "LambdaLR of an object": lambda optimizer: schedulers.LambdaLR(optimizer, Schedule().factor),
    "MultiplicativeLR": partial(schedulers.MultiplicativeLR, lr_lambda=lambda step: 0.9),
    "StepLR": partial(schedulers.StepLR, step_size=2),
    "MultiStepLR": multistep,
    "ConstantLR": partial(schedulers.ConstantLR, total_iters=4),
    "LinearLR": warmup,
    "ExponentialLR": partial(schedulers.ExponentialLR, gamma=0.8),
    "CosineAnnealingLR": partial(schedulers.CosineAnnealingLR, T_max=5),
    "CosineAnnealingWarmRestarts": partial(schedulers.CosineAnnealingWarmRestarts, T_0=2, T_mult=2),
    "CyclicLR": partial(schedulers.CyclicLR, base_lr=0.01, max_lr=0.2, step_size_up=2, mode="exp_range", gamma=0.9),
    "CyclicLR with a function": partial(
        schedulers.CyclicLR, base_lr=0.01, max_lr=0.2, step_size_up=2, scale_fn=lambda x: 1 / (1 + x)
    ),
    "OneCycleLR": partial(schedulers.OneCycleLR, max_lr=0.3, total_steps=20),
    "PolynomialLR": partial(schedulers.PolynomialLR, total_iters=6, power=2),
    "ReduceLROnPlateau": partial(schedulers.ReduceLROnPlateau, patience=1, cooldown=1),
    "SWALR": partial(SWALR, swa_lr=0.02, anneal_epochs=4),
    "SequentialLR": sequence(warmup, multistep),
    "ChainedScheduler": chain(multistep, schedulers.ConstantLR),
    "sequence in a chain": chain(sequence(warmup, multistep), multistep),
    "chain of chains": chain(chain(multistep, warmup), chain(schedulers.ConstantLR)),
}
sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
OPTIMIZERS: dict[str, Callable[..., Any]] = {
    **{
        name: partial(getattr(torch.optim, name), lr=0.01)
        for name in torch.optim.__all__
        if isinstance(getattr(torch.optim, name), type) and name != "Optimizer"
    },
    "SGD with Nesterov": partial(sgd, nesterov=True),
    "centered RMSprop": partial(torch.optim.RMSprop, centered=True, momentum=0.9),
    "AMSGrad": lambda parameters: torch.optim.AdamW(parameters, amsgrad=True, lr=torch.tensor(0.01)),
    "fused Adam": partial(torch.optim.Adam, fused=True),
    "LBFGS with line search": partial(torch.optim.LBFGS, line_search_fn="strong_wolfe"),
}


class Training:
    """A small training whose batches depend on the step alone."""

    def __init__(self, make_optimizer: Callable[..., Any], make_scheduler: Callable[..., Any] = multistep) -> None:
        torch.manual_seed(0)
        self.is_sparse = make_optimizer is OPTIMIZERS["SparseAdam"]
        model = nn.Embedding(5, 3, sparse=True) if self.is_sparse else nn.Linear(4, 3, bias=False)
        optimizer = make_optimizer(model.parameters())
        self.state = TrainingState(model, optimizer, RandomStreams(1), scheduler=make_scheduler(optimizer))

    def loss(self, step: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(step)
        inputs = (
            torch.randint(5, (6,), generator=generator) if self.is_sparse else torch.randn(6, 4, generator=generator)
        )
        self.state.optimizer.zero_grad()
        loss = (self.state.model(inputs) - 1).square().mean()
        loss.backward()
        return loss

    def train(self, start: int, end: int) -> list[Any]:
        """Train and return the groups' options and the weights after every step."""
        state, seen = self.state, []
        for step in range(start, end):
            state.optimizer.step(lambda step=step: self.loss(step))
            plateau = isinstance(state.scheduler, schedulers.ReduceLROnPlateau)
            state.scheduler.step(*[1.0] * plateau)
            options = [
                {key: str(item) for key, item in group.items() if key != "params"}
                for group in state.optimizer.param_groups
            ]
            seen.append((options, state.model.weight.tolist()))
        return seen


ROWS = [
    *[pytest.param(sgd, make, id=name) for name, make in SCHEDULERS.items()],
    *[pytest.param(make, multistep, id=name) for name, make in OPTIMIZERS.items()],
]
each_row = pytest.mark.parametrize(("make_optimizer", "make_scheduler"), ROWS)
TOTAL = 9


def test_all_schedulers_of_torch_are_covered() -> None:
    """Every class of ``torch.optim.lr_scheduler`` is a row of the tests of resumed schedules."""
    kinds = {type(make(sgd([torch.zeros(1)]))) for make in SCHEDULERS.values()}
    classes = [item for name in schedulers.__all__ if isinstance(item := getattr(schedulers, name), type)]
    assert {*classes} - {schedulers.LRScheduler} <= kinds


@pytest.mark.some_rows(3)
@each_row
@pytest.mark.parametrize("stop", [1, 4])
def test_resumed_schedule_equals_the_uninterrupted_one(make_optimizer, make_scheduler, stop, tmp_path: Path) -> None:
    """After a checkpoint is loaded into a new run, rates, options and weights are those of the whole run."""
    whole, stopped, resumed = [Training(make_optimizer, make_scheduler) for _ in range(3)]
    expected = whole.train(0, TOTAL)
    stopped.train(0, stop)
    save_checkpoint(tmp_path / "a", stopped.state, {}, stopped.state.streams.save())
    load_checkpoint(tmp_path / "a", resumed.state)
    assert resumed.train(stop, TOTAL) == expected[stop:]
    load_checkpoint(tmp_path / "a", resumed.state)  # into a run that is further, as in a rewind
    assert resumed.train(stop, TOTAL) == expected[stop:]


@pytest.mark.some_rows(2)
@pytest.mark.longer
@each_row
@pytest.mark.guarantee("interventions-are-undone")
def test_steps_of_all_schedulers_are_rolled_back(make_optimizer, make_scheduler) -> None:
    """Steps within an intervention leave no trace in the later rates and weights."""
    whole, disturbed = Training(make_optimizer, make_scheduler), Training(make_optimizer, make_scheduler)
    expected, seen, copy = whole.train(0, TOTAL), [], StateCopy()
    for step in range(TOTAL):
        copy.save(disturbed.state)
        disturbed.train(step + 3, step + 6)
        copy.restore(disturbed.state)
        seen += disturbed.train(step, step + 1)
    assert seen == expected


@pytest.mark.guarantee("interventions-are-undone")
def test_changed_milestones_are_rolled_back() -> None:
    """An intervention may empty, replace and count the milestones."""
    training = Training(sgd)
    copy = StateCopy().save(training.state)
    for change in (lambda kept: kept.clear(), lambda kept: kept.update([2, 3]), lambda kept: kept.subtract([3])):
        change(training.state.scheduler.milestones)
        copy.restore(training.state)
        assert training.state.scheduler.milestones == {1: 1, 3: 2, 5: 1}
