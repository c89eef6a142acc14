"""The training metrics against the values of the loop and of the evaluation."""

import pytest
import torch
from loopscope.hooks import HookPoint, HookRegistry, Metrics, RunDataContext, Series
from loopscope.hooks.selection import select_hooks
from loopscope.isolation import Isolation
from loopscope.training_hooks.progress import TrainingMetrics

from tests.support import Case, SpyHook, at, train


def losses(case: Case, **options) -> list[float]:
    """Return the loss of every step from the loop."""
    seen: list[torch.Tensor] = []
    train(case, [at(SpyHook, HookPoint.POST_STEP)(lambda ctx: seen.append(ctx.loss.clone()))], **options)
    return [loss.item() for loss in seen]


def rates(case: Case, **options) -> list[float]:
    """Return the learning rate that the optimizer used in every step."""
    seen: list[float] = []
    train(case, [at(SpyHook, HookPoint.PRE_UPDATE)(lambda ctx: seen.append(ctx.lr))], **options)
    return seen


def evaluated(**numbers: float):
    return lambda model: dict(numbers)


@pytest.mark.longer
def test_epoch_reports_loss_learning_rate_and_evaluation():
    evaluate = evaluated(train_acc=0.5, val_acc=0.25, val_loss=1.5)
    run = train(Case(), [TrainingMetrics()], evaluate=evaluate)
    ((metrics, epoch, point, step),) = run.sink.emitted
    assert (epoch, point, step) == (0, HookPoint.POST_EPOCH, 3)
    assert metrics == {
        "training_metrics/loss": pytest.approx(sum(losses(Case())) / 3, rel=1e-6),
        "training_metrics/lr": rates(Case())[-1],
        "training_metrics/train_acc": 0.5,
        "training_metrics/val_acc": 0.25,
        "training_metrics/evaluation": {"val_loss": 1.5},
    }


@pytest.mark.parametrize("interval", ["epoch", "step"])
def test_learning_rate_is_from_the_last_step(interval):
    """The scheduler changes it afterwards, by epoch or by step."""
    used: list[float] = []
    spy = at(SpyHook, HookPoint.PRE_UPDATE)(lambda ctx: used.append(ctx.lr))
    run = train(Case(), [TrainingMetrics(), spy], steps=6, scheduler_interval=interval)
    reported = [metrics["training_metrics/lr"] for metrics, *_ in run.sink.emitted if "training_metrics/lr" in metrics]
    assert reported == [used[2], used[5]]
    assert used[5] < used[2]
    assert run.task.optimizer.param_groups[0]["lr"] != used[5]


@pytest.mark.longer
def test_tensor_learning_rate_is_reported_as_used():
    """A learning rate in a tensor gives the same values as a float."""

    def in_tensors(task, state):
        for group in task.optimizer.param_groups:
            group |= {"lr": torch.tensor(group["lr"]), "foreach": False}

    plain, tensors = (
        [
            float(metrics["training_metrics/lr"])
            for metrics, *_ in train(Case(), [TrainingMetrics()], steps=6, **how).sink.emitted
        ]
        for how in ({}, {"introduce": in_tensors})
    )
    assert tensors == pytest.approx(plain, rel=1e-6)


def test_missing_evaluation_is_not_reported():
    run = train(Case(), [TrainingMetrics()], evaluate=evaluated())
    ((metrics, *_),) = run.sink.emitted
    assert set(metrics) == {"training_metrics/loss", "training_metrics/lr"}


def test_missing_evaluation_is_not_repeated():
    """Accuracies appear only in epochs with an evaluation."""
    run = train(Case(), [TrainingMetrics()], steps=12, eval_every=3)
    reported = [epoch for metrics, epoch, *_ in run.sink.emitted if "training_metrics/val_acc" in metrics]
    assert reported == [2, 3]


@pytest.mark.longer
def test_step_loop_reports_loss_and_learning_rate_series():
    case = Case(loop="step")
    run = train(case, [TrainingMetrics()], steps=5, log_every=10, snapshot_every=10)
    metrics = next(metrics for metrics, _, point, _ in run.sink.emitted if point is HookPoint.POST_STEP)
    assert metrics["training_metrics/loss"] == Series([1, 2, 3, 4, 5], losses(case, steps=5))
    assert metrics["training_metrics/lr"] == Series([1, 2, 3, 4, 5], rates(case, steps=5))


def test_step_loop_reports_evaluation_at_the_snapshot():
    case, evaluate = Case(loop="step"), evaluated(val_acc=0.75, val_loss=2.0)
    run = train(case, [TrainingMetrics()], steps=6, eval_every=4, snapshot_every=2, evaluate=evaluate)
    at_snapshots = [(metrics, step) for metrics, _, point, step in run.sink.emitted if point is HookPoint.SNAPSHOT]
    expected = {"training_metrics/val_acc": 0.75, "training_metrics/evaluation": {"val_loss": 2.0}}
    assert at_snapshots == [(expected, 4), (expected, 6)]


def test_hook_keeps_the_loss_on_its_device():
    losses_given = []

    class Kept(TrainingMetrics):
        def compute(self, ctx):
            metrics = super().compute(ctx)
            losses_given.append(metrics.get("loss") is ctx.loss)
            return metrics

    train(Case(loop="step"), [at(Kept, loop_points={"step": {HookPoint.POST_STEP}}, reports_evaluations=False)()])
    assert losses_given == [True] * 3


def test_training_metrics_accompany_any_other_hook():
    """They come first, and are off when no hook is enabled."""
    assert HookRegistry.get("training_metrics") is TrainingMetrics
    assert select_hooks(None, ["norms"], {}, "any") == ["training_metrics", "norms"]
    assert select_hooks(None, [], {}, "any") == []


@pytest.mark.parametrize("loop", ["epoch", "step"])
def test_every_reported_name_is_described(loop):
    run = train(Case(loop=loop), [TrainingMetrics()], evaluate=evaluated(train_acc=1, val_acc=1, other=1))
    names = {name.removeprefix("training_metrics/") for metrics, *_ in run.sink.emitted for name in metrics}
    assert names == {info.name for info in TrainingMetrics().describe_metrics()}


class CalledMetrics(TrainingMetrics):
    """The same metrics from calls at every step."""

    def compute(self, ctx: RunDataContext) -> Metrics:
        return super().compute(ctx)


def test_values_of_steps_need_no_visit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The record of the loop's values replaces the calls in steps, with the same rows."""
    visits: list[int] = []
    start = Isolation.start_visit

    def counted(isolation: Isolation) -> None:
        visits[-1] += 1
        start(isolation)

    monkeypatch.setattr(Isolation, "start_visit", counted)
    rows = []
    for kind in (TrainingMetrics, CalledMetrics):
        visits.append(0)
        result = train(Case(loop="step"), [kind()])
        rows.append([result.sink.rows(f"training_metrics/{name}") for name in ("loss", "lr")])
    assert rows[0] == rows[1]
    assert visits[1] - visits[0] == len(rows[0][0])
