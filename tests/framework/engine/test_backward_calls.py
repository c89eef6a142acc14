"""Calls of hooks before backward passes: their schedule, their context, and their isolation."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from loopscope.errors import HookError, StateMutationError
from loopscope.hooks import EVERY_STEP, BackwardContext, HookPoint, StepSchedule
from torch.nn import functional as F

from tests.support import Case, SpyHook, assert_same_bytes, train

EVERY_THIRD = StepSchedule(mode="stride", every_n_steps=3)


class Reader(SpyHook):
    """Calls ``read`` before backward passes."""

    hook_points = frozenset({HookPoint.POST_STEP})

    def __init__(self, read: Callable[[BackwardContext], object], schedule: StepSchedule = EVERY_STEP) -> None:
        super().__init__()
        self.read, self.step_schedule = read, schedule

    def before_backward(self, ctx: BackwardContext) -> None:
        self.read(ctx)


def test_calls_follow_the_step_schedule() -> None:
    calls: list[tuple[int, int, bool]] = []
    reader = Reader(lambda ctx: calls.append((ctx.step, ctx.index, ctx.is_due)), EVERY_THIRD)
    train(Case(), [reader], steps=6, accumulation_steps=2)
    assert calls == [(step, index, True) for step in (1, 4) for index in (0, 1)]


def test_first_nonfinite_loss_is_shown_once() -> None:
    """At a step that is not due, only the first loss that is not finite is shown."""
    calls: list[tuple[int, bool, bool]] = []
    reader = Reader(lambda ctx: calls.append((ctx.step, ctx.is_due, bool(ctx.loss.isnan()))), EVERY_THIRD)

    def compute_loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        return F.cross_entropy(model(batch[0]), batch[1]) * float("nan")

    train(Case(), [reader], steps=6, compute_loss=compute_loss)
    assert calls == [(1, True, True), (2, False, True), (4, True, True)]


def test_context_has_loss_and_parameters() -> None:
    def read(ctx: BackwardContext) -> None:
        assert ctx.loss.grad_fn is not None
        assert "0.weight" in ctx.parameters
        assert not torch.is_grad_enabled()
        steps.append(ctx.step)

    steps: list[int] = []
    train(Case(), [Reader(read)], steps=3)
    assert steps == [1, 2, 3]


def test_draws_leave_the_run_unchanged() -> None:
    case = Case("transformer")  # with dropout
    assert_same_bytes(train(case, [Reader(lambda ctx: torch.rand(3))], audit=True), case)


def test_errors_are_failures_of_the_hook() -> None:
    def fail(ctx: BackwardContext) -> None:
        raise ValueError("no graph")

    with pytest.raises(HookError, match=r"'spy' raised at before_backward of step 1.*no graph"):
        train(Case(), [Reader(fail)])


def write_to_parameter(ctx: BackwardContext) -> None:
    next(iter(ctx.parameters.values())).zero_()


def write_to_loss(ctx: BackwardContext) -> None:
    ctx.loss.mul_(2)


def add_hook_to_loss(ctx: BackwardContext) -> None:
    ctx.loss.register_hook(lambda gradient: gradient * 2)


def add_hook_to_node(ctx: BackwardContext) -> None:
    assert ctx.loss.grad_fn is not None
    ctx.loss.grad_fn.next_functions[0][0].register_prehook(lambda gradients: gradients)


@pytest.mark.parametrize("change", [write_to_parameter, write_to_loss, add_hook_to_loss, add_hook_to_node])
def test_changes_before_backward_end_the_run(change: Callable[[BackwardContext], None]) -> None:
    with pytest.raises(StateMutationError, match="'spy' at before_backward of step 1"):
        train(Case(), [Reader(change)])
