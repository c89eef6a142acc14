"""Descriptions of backward passes, in all loops."""

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from loopscope import attach
from loopscope.doctor.senses import BackwardPass, backward_recorder
from loopscope.doctor.senses.backward_recorder import with_gradient
from loopscope.doctor.senses.loss_graph import describe_loss
from loopscope.errors import RunNotice
from loopscope.hooks import HookPoint, StepSchedule
from torch import Tensor, nn
from torch.nn import functional as F

from tests.framework.doctor.senses.loss_reader import LossReader, Passes
from tests.support import LOOPS, Case, SpyHook, train


def three_steps(folder: Path, hook: SpyHook, accumulate: int = 1, *, zeroes: bool = True) -> None:
    """Train three steps in a custom loop, which divides no loss."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = [torch.full((4, 3), float(index + 1)) for index in range(3 * accumulate)]
    with attach(model, optimizer, hooks=[hook], out=folder, accumulate=accumulate, display="none") as scope:
        for index, batch in enumerate(scope.batches(batches), start=1):
            scope.backward(F.cross_entropy(model(batch), torch.tensor([0, 1, 0, 1]), reduction="sum"))
            if index % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad() if zeroes else None


@pytest.mark.parametrize("loop", LOOPS)
def test_experiment_loops_describe_each_micro_batch(loop: str) -> None:
    passes: Passes = {}
    train(Case(loop=loop), [LossReader(passes)], steps=6, accumulation_steps=2)
    assert sorted(passes) == [1, 2, 3, 4, 5, 6]
    assert all(len(described) == 2 for described in passes.values())
    # a micro-batch's loss is weighted by its share of the rows
    shares = [sum(1 / one.divisor for one in described) for described in passes.values()]
    assert shares == pytest.approx([1.0] * 6)
    assert not any(one.leftover_gradients for described in passes.values() for one in described)


def test_descriptions_follow_the_step_schedule() -> None:
    passes: Passes = {}
    schedule = StepSchedule(mode="stride", every_n_steps=3)
    every_step = {HookPoint.POST_BACKWARD: StepSchedule()}
    train(Case(), [LossReader(passes, step_schedule=schedule, point_schedules=every_step)], steps=6)
    assert [bool(passes[step]) for step in range(1, 7)] == [True, False, False, True, False, False]


def test_custom_loop_reports_gradients_that_nothing_zeroes(tmp_path: Path) -> None:
    for zeroes, expected in ((True, ()), (False, ("weight", "bias"))):
        passes: Passes = {}
        three_steps(tmp_path / str(zeroes), LossReader(passes), zeroes=zeroes)
        assert [passes[step][0].leftover_gradients for step in (1, 2, 3)] == [(), expected, expected]
        assert passes[2][0].reduction == "sum"


def test_second_micro_batches_add_to_gradients(tmp_path: Path) -> None:
    passes: Passes = {}
    three_steps(tmp_path, LossReader(passes), accumulate=2)
    assert [len(described) for described in passes.values()] == [2, 2, 2]
    assert not any(one.leftover_gradients for described in passes.values() for one in described)
    assert all(first.accumulated_gradients == () for first, _ in passes.values())
    assert all(second.accumulated_gradients == ("weight", "bias") for _, second in passes.values())


def test_first_evaluation_of_a_closure_is_described(tmp_path: Path) -> None:
    passes: Passes = {}
    model = nn.Linear(3, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    with attach(model, optimizer, hooks=[LossReader(passes)], out=tmp_path, display="none") as scope:
        for batch in scope.batches([torch.ones(4, 3), torch.zeros(4, 3)]):

            def closure(batch: Tensor = batch) -> Tensor:
                optimizer.zero_grad()
                loss = F.mse_loss(model(batch), torch.ones(4, 1))
                scope.backward(loss)
                return loss

            optimizer.step(scope.closure(closure))
    assert [[one.reduction for one in passes[step]] for step in (1, 2)] == [["mean"], ["mean"]]


def test_gradients_computed_by_the_loop_have_no_description(tmp_path: Path) -> None:
    passes: Passes = {}
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attach(model, optimizer, hooks=[LossReader(passes)], out=tmp_path, display="none") as scope:
        for batch in scope.batches([torch.ones(4, 3)]):
            parameters = [*model.parameters()]
            for parameter, gradient in zip(
                parameters, torch.autograd.grad(model(batch).sum(), parameters), strict=True
            ):
                parameter.grad = gradient
            scope.gradients_ready()
            optimizer.step()
    assert passes == {1: ()}


def test_gradients_of_zeros_count_as_none() -> None:
    values: dict[str, nn.Parameter] = {name: nn.Parameter(torch.ones(2)) for name in ("a", "b", "c", "frozen")}
    values["a"].grad, values["b"].grad = torch.tensor([0.0, 1e-30]), torch.zeros(2)
    values["frozen"].requires_grad_(False).grad = torch.ones(2)
    values["sparse"] = nn.Parameter(torch.ones(3, 2))
    values["sparse"].grad = torch.eye(3, 2).to_sparse()
    assert with_gradient(values) == ("a", "sparse")
    assert with_gradient({}) == ()


class Token:
    """An object whose end is noticed."""


class Marked(torch.autograd.Function):
    """A function whose node keeps a token."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, token: Token, freed: list[bool]) -> Tensor:
        ctx.token = token
        weakref.finalize(token, freed.append, True)
        return values * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient * 2, None, None


def test_no_graph_outlives_the_description() -> None:
    """The graph of the loss is freed by reference counting alone."""
    freed: list[bool] = []
    loss = F.mse_loss(Marked.apply(nn.Parameter(torch.ones(3)), Token(), freed), torch.zeros(3))
    described = describe_loss(loss)
    assert not freed
    del loss
    assert described.reduction == "mean"
    assert freed


def test_unreadable_graph_costs_only_its_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    """One notice names the error, and the hook is called in every step, with neutral facts."""

    def fail(*arguments: Any, **options: Any) -> BackwardPass:
        raise TypeError("an unknown node")

    monkeypatch.setattr(backward_recorder, "describe_loss", fail)
    passes: Passes = {}
    with pytest.warns(RunNotice, match="graph of the loss cannot be read") as notices:
        train(Case(), [LossReader(passes)], steps=3)
    assert len([item for item in notices if "TypeError: an unknown node" in str(item.message)]) == 1
    assert passes == dict.fromkeys((1, 2, 3), (BackwardPass(),))
