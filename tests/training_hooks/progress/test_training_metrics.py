"""The training metrics against what the loop computed and the experiment evaluated."""

import pytest
import torch
from loopscope.hooks import HookPoint, HookRegistry, Series, select_hooks
from loopscope.training_hooks.progress import TrainingMetrics

from tests.support import Case, SpyHook, at, train


def losses(case: Case, **options) -> list[float]:
    """Return the loss of every step, as the loop computed it."""
    seen: list[torch.Tensor] = []
    train(case, [at(SpyHook, HookPoint.POST_STEP)(lambda ctx: seen.append(ctx.loss.clone()))], **options)
    return [loss.item() for loss in seen]


def evaluated(**numbers: float):
    return lambda model: dict(numbers)


def test_an_epoch_reports_mean_loss_accuracies_rate_and_the_rest_of_the_evaluation():
    evaluate = evaluated(train_acc=0.5, val_acc=0.25, val_loss=1.5)
    run = train(Case(), [TrainingMetrics()], evaluate=evaluate)
    ((metrics, epoch, point, step),) = run.sink.emitted
    assert (epoch, point, step) == (0, HookPoint.POST_EPOCH, 3)
    assert metrics == {
        "training_metrics/loss": pytest.approx(sum(losses(Case())) / 3, rel=1e-6),
        "training_metrics/lr": run.task.optimizer.param_groups[0]["lr"],
        "training_metrics/train_acc": 0.5,
        "training_metrics/val_acc": 0.25,
        "training_metrics/evaluation": {"val_loss": 1.5},
    }


def test_the_rate_is_the_one_that_the_next_epoch_uses():
    run = train(Case(), [TrainingMetrics()], steps=6)
    reported = [metrics["training_metrics/lr"] for metrics, *_ in run.sink.emitted]
    used: list[float] = []
    train(Case(), [at(SpyHook, HookPoint.PRE_EPOCH)(lambda ctx: used.append(ctx.lr))], steps=6)
    assert reported[0] == used[1] < used[0]


def test_what_does_not_exist_is_not_reported():
    run = train(Case(), [TrainingMetrics()], evaluate=evaluated())
    ((metrics, *_),) = run.sink.emitted
    assert set(metrics) == {"training_metrics/loss", "training_metrics/lr"}


def test_an_epoch_without_evaluation_does_not_repeat_the_last_one():
    run = train(Case(), [TrainingMetrics()], steps=12, eval_every=3)
    reported = [epoch for metrics, epoch, *_ in run.sink.emitted if "training_metrics/val_acc" in metrics]
    assert reported == [2, 3]


def test_the_step_loop_reports_every_steps_loss_and_rate_as_series():
    case = Case(loop="step")
    run = train(case, [TrainingMetrics()], steps=5, log_every=10, snapshot_every=10)
    metrics = next(metrics for metrics, _, point, _ in run.sink.emitted if point is HookPoint.POST_STEP)
    assert metrics["training_metrics/loss"] == Series([1, 2, 3, 4, 5], losses(case, steps=5))
    assert metrics["training_metrics/lr"].values[-1] == run.task.optimizer.param_groups[0]["lr"]


def test_the_step_loop_reports_a_fresh_evaluation_at_the_snapshot():
    case, evaluate = Case(loop="step"), evaluated(val_acc=0.75, val_loss=2.0)
    run = train(case, [TrainingMetrics()], steps=6, eval_every=4, snapshot_every=2, evaluate=evaluate)
    at_snapshots = [(metrics, step) for metrics, _, point, step in run.sink.emitted if point is HookPoint.SNAPSHOT]
    expected = {"training_metrics/val_acc": 0.75, "training_metrics/evaluation": {"val_loss": 2.0}}
    assert at_snapshots == [(expected, 4), (expected, 6)]


def test_the_loss_is_not_moved_to_the_host_by_the_hook():
    losses_given = []

    class Kept(TrainingMetrics):
        def compute(self, ctx):
            metrics = super().compute(ctx)
            losses_given.append(metrics["loss"] is ctx.loss)
            return metrics

    train(Case(loop="step"), [at(Kept, loop_points={"step": {HookPoint.POST_STEP}})()])
    assert losses_given == [True] * 3


def test_it_leads_whenever_any_hook_is_on_and_only_then():
    assert HookRegistry.get("training_metrics") is TrainingMetrics
    assert select_hooks(None, ["norms"], {}, "any") == ["training_metrics", "norms"]
    assert select_hooks(None, [], {}, "any") == []


@pytest.mark.parametrize("loop", ["epoch", "step"])
def test_every_reported_name_is_described(loop):
    run = train(Case(loop=loop), [TrainingMetrics()], evaluate=evaluated(train_acc=1, val_acc=1, other=1))
    names = {name.removeprefix("training_metrics/") for metrics, *_ in run.sink.emitted for name in metrics}
    assert names == {info.name for info in TrainingMetrics().describe_metrics()}
