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


def rates(case: Case, **options) -> list[float]:
    """Return the learning rate of every step, as the optimizer used it."""
    seen: list[float] = []
    train(case, [at(SpyHook, HookPoint.PRE_UPDATE)(lambda ctx: seen.append(ctx.lr))], **options)
    return seen


def evaluated(**numbers: float):
    return lambda model: dict(numbers)


def test_an_epoch_reports_mean_loss_accuracies_rate_and_the_rest_of_the_evaluation():
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
def test_the_rate_is_the_one_that_the_last_step_of_the_epoch_used(interval):
    used: list[float] = []
    spy = at(SpyHook, HookPoint.PRE_UPDATE)(lambda ctx: used.append(ctx.lr))
    run = train(Case(), [TrainingMetrics(), spy], steps=6, scheduler_interval=interval)
    reported = [metrics["training_metrics/lr"] for metrics, *_ in run.sink.emitted if "training_metrics/lr" in metrics]
    assert reported == [used[2], used[5]]
    assert used[5] < used[2]
    assert run.task.optimizer.param_groups[0]["lr"] != used[5]


def test_a_rate_in_a_tensor_is_reported_as_it_was_at_the_step():
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
    assert metrics["training_metrics/lr"] == Series([1, 2, 3, 4, 5], rates(case, steps=5))


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
