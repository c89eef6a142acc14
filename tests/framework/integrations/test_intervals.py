"""Intervals of attached loops: SNAPSHOT at the end, means since the last one, evaluations at their steps."""

import logging
from collections.abc import Iterator

import pytest
import torch
from loopscope import attach, read_run
from loopscope.errors import HookError, UsageError
from loopscope.hooks import HookPoint
from torch import Tensor, nn
from torch.nn import functional

from tests.support import Case, SpyHook, at, train

STEPS = 7
EVALUATION = "training_metrics/evaluation/val_loss"


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(4, 3, generator=generator), torch.randn(4, 2, generator=generator)) for _ in range(STEPS)]


def trained(folder, hooks, *, evaluate_at=(), **options) -> None:
    """Train a linear layer for seven steps with attached hooks, and evaluate after some of them."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    options = {"loop": "step", "display": "none"} | options
    with attach(model, optimizer, hooks=hooks, out=folder, **options) as scope:
        for step, (x, y) in enumerate(scope.batches(batches()), 1):
            scope.backward(functional.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            for number in range(evaluate_at.count(step)):
                scope.evaluate(lambda number=number, step=step: {"val_loss": step + number / 10})


def values(folder, name: str) -> list[tuple[int, float]]:
    return [(step, value) for _, step, _, metric, value in read_run(folder).points if metric == name]


@pytest.mark.parametrize("loop", ["step", "epoch"])
@pytest.mark.parametrize("snapshot_every", [None, 3, 7])
def test_every_evaluation_is_recorded_at_its_step(tmp_path, loop, snapshot_every):
    trained(tmp_path, ["norms"], evaluate_at=(2, 3, 7), loop=loop, snapshot_every=snapshot_every)
    assert values(tmp_path, EVALUATION) == [(2, 2.0), (3, 3.0), (7, 7.0)]


def test_two_evaluations_of_one_step_are_recorded(tmp_path):
    trained(tmp_path, ["norms"], evaluate_at=(2, 2))
    assert values(tmp_path, EVALUATION) == [(2, 2.0), (2, 2.1)]


def test_step_loop_ends_with_a_snapshot(tmp_path):
    spy = at(SpyHook, HookPoint.SNAPSHOT)()
    trained(tmp_path, [spy], snapshot_every=3)
    assert [step for _, _, step in spy.seen] == [3, 6, 7]


def test_epoch_loop_ends_with_a_snapshot(tmp_path):
    """With an interval of two epochs, a training of one epoch has one SNAPSHOT."""
    spy = at(SpyHook, HookPoint.SNAPSHOT)()
    trained(tmp_path, [spy], loop="epoch", snapshot_every=2)
    assert spy.seen == [("SNAPSHOT", 0, 7)]


def test_failed_loop_ends_without_a_snapshot(tmp_path):
    spy = at(SpyHook, HookPoint.SNAPSHOT)()
    failing = at(SpyHook, HookPoint.POST_STEP, name="failing")(lambda ctx: 1 / (5 - ctx.step))
    with pytest.raises(HookError):
        trained(tmp_path, [spy, failing], on_hook_error="raise")
    assert not spy.seen


def test_epoch_hooks_see_means_of_the_interval(tmp_path):
    """A hook at POST_EPOCH is called at SNAPSHOT with the mean loss and gradient since the last one."""
    seen: list[tuple[int, float, Tensor]] = []
    record = lambda ctx: seen.append((ctx.step, ctx.loss, ctx.accumulated_grads["weight"].clone()))
    trained(tmp_path, [at(SpyHook, HookPoint.POST_EPOCH, needs_grads=True)(record)], snapshot_every=3, log_every=2)
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    losses = [functional.mse_loss(model(x), y) for x, y in batches()]
    gradients = [torch.autograd.grad(loss, model.weight)[0] for loss in losses]
    for (step, loss, gradient), (first, last) in zip(seen, [(0, 3), (3, 6), (6, 7)], strict=True):
        assert step == last
        assert loss == pytest.approx(float(torch.stack(losses[first:last]).detach().mean()))
        torch.testing.assert_close(gradient, torch.stack(gradients[first:last]).mean(0))


def test_named_hook_that_never_fires_is_refused(tmp_path):
    spy = at(SpyHook, loop_points={"epoch": {HookPoint.POST_EPOCH}})()
    with pytest.raises(UsageError, match="'spy' is never called in the step loop: its loop_points have no point"):
        trained(tmp_path, [spy])


def test_own_step_loop_reports_evaluations_between_snapshots():
    """With an evaluation after every step, the hook that reports evaluations is called after each."""
    spy = at(SpyHook, HookPoint.SNAPSHOT, reports_evaluations=True)()
    train(Case(loop="step"), [spy], steps=5, eval_every=1, snapshot_every=3)
    assert [step for _, _, step in spy.seen] == [1, 2, 3, 4, 5]


class Kept(logging.Handler):
    """Keeps the records of loopscope's logger."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@pytest.fixture
def logged() -> Iterator[list[logging.LogRecord]]:
    logger, handler = logging.getLogger("loopscope"), Kept()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler.records
    logger.setLevel(level)
    logger.removeHandler(handler)


def test_runs_are_logged(tmp_path, logged):
    """The logger reports the start with the hooks, each evaluation, and the end."""
    trained(tmp_path / "run", ["norms"], evaluate_at=(2,))
    assert [record.getMessage() for record in logged] == [
        "Started attached/run with the hooks training_metrics, norms.",
        "Evaluation after step 2: {'val_loss': 2.0}",
        "Ended as completed after step 7.",
    ]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_failures_are_logged_as_errors(tmp_path, logged):
    spy = at(SpyHook, HookPoint.POST_STEP)(lambda ctx: 1 / 0)
    trained(tmp_path, [spy], on_hook_error="skip")
    assert [record.levelname for record in logged if record.levelno > logging.INFO] == ["ERROR"]
