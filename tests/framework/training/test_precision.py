"""Mixed precision: runs with autocast and loss scaling, whose hooks see unscaled gradients."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from loopscope.hooks import STEP_POINTS, HookPoint
from loopscope.state import TrainingState
from loopscope.training import Precision, TrainingTask
from torch import Tensor, nn
from torch.amp import GradScaler

from tests.framework.runs.small_experiment import Small, SmallSteps, read_json, registered, session
from tests.support import LOOPS, ActingHook, Case, Run, SpyHook, at, differences, mean_loss, train

POST_BACKWARD = HookPoint.POST_BACKWARD
CASES = [Case(model, "adamw_fused", loop) for model in ("batchnorm_mlp", "tied") for loop in LOOPS]
CASES.append(Case("transformer", "sgd_momentum"))
OVERFLOWING = {"batchnorm_mlp": 2.0**18, "tied": 2.0**16, "transformer": 2.0**17}
"""Loss scales at which the first step is skipped and the second is not."""


def mixed(amp: str, scale: float = 2.0**10) -> dict[str, Any]:
    """Return the fields of a task in mixed precision."""
    precision = Precision.of(amp, torch.device("cpu"))
    scaler = GradScaler("cpu", init_scale=scale) if precision.scaler() else None
    return {"compute_loss": precision.autocast(mean_loss), "scaler": scaler}


def train_mixed(amp: str, *args: Any, scale: float = 2.0**10, **options: Any) -> Run:
    fields = mixed(amp, scale)

    def introduce(task: TrainingTask, state: TrainingState) -> None:
        task.compute_loss, task.scaler = fields["compute_loss"], fields["scaler"]
        state.scaler = task.scaler

    return train(*args, introduce=introduce, **options)


def recorder(values: list[Any], read: Callable[[Any], Any], *points: HookPoint) -> SpyHook:
    return at(SpyHook, *points)(lambda ctx: values.append(read(ctx)))


def gradients(ctx: Any) -> dict[str, Tensor]:
    return {name: parameter.grad.clone() for name, parameter in ctx.model.named_parameters()}


@pytest.mark.longer
@pytest.mark.some_rows(3)
@pytest.mark.guarantee("every-training-mode")
@pytest.mark.parametrize("amp", ["bf16", "fp16"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_hooks_preserve_mixed_precision_run(case: Case, amp: str) -> None:
    """An intervention trains an epoch, and one step is skipped in float16."""

    def disturb(run_ctx, model_ctx) -> None:
        model_ctx.compute_batch_gradients()
        model_ctx.take_step()
        model_ctx.run_training_epoch(model_ctx.get_shuffled_loader(), step=False)
        model_ctx.run_training_epoch(model_ctx.get_shuffled_loader())

    hooks = [at(ActingHook, POST_BACKWARD, HookPoint.POST_STEP)(disturb), recorder([], gradients, POST_BACKWARD)]
    scale = OVERFLOWING[case.model]
    bare, hooked = (train_mixed(amp, case, active, scale=scale) for active in ((), hooks))
    assert bare.state.loop.skipped_steps == (amp == "fp16")
    assert len(bare.digests) == len(hooked.digests) == 3
    for before, after in zip(bare.digests, hooked.digests, strict=True):
        assert not differences(before, after)


@pytest.mark.some_rows(2)
@pytest.mark.guarantee("every-training-mode")
@pytest.mark.parametrize("points", [(POST_BACKWARD,), (HookPoint.PRE_UPDATE,), (HookPoint.POST_STEP,)])
def test_hooks_see_unscaled_gradients(points: tuple[HookPoint]) -> None:
    """Hooks in mixed precision receive unscaled gradients."""
    case, plain, scaled = Case("tied", "sgd_momentum"), [], []
    train(case, [recorder(plain, gradients, *points)], steps=1)
    train_mixed("fp16", case, [recorder(scaled, gradients, *points)], steps=1)
    for expected, actual in zip(plain[0].values(), scaled[0].values(), strict=True):
        assert actual.dtype is torch.float32
        torch.testing.assert_close(actual, expected, rtol=0.03, atol=1e-3)


def test_accumulated_micro_batches_are_unscaled_once() -> None:
    of_batch, of_micro_batches = [], []
    for recorded, count in ((of_batch, 1), (of_micro_batches, 3)):
        spy = recorder(recorded, gradients, POST_BACKWARD)
        train_mixed("fp16", Case("transformer"), [spy], steps=1, accumulation_steps=count)
    for expected, actual in zip(of_batch[0].values(), of_micro_batches[0].values(), strict=True):
        torch.testing.assert_close(actual, expected, rtol=0.02, atol=1e-4)


@pytest.mark.parametrize("loop", LOOPS)
def test_skipped_step_changes_no_weight(loop: str) -> None:
    """A skipped step fires only PRE_STEP and POST_BACKWARD."""
    calls: list[tuple[str, int, Tensor]] = []
    spy = recorder(calls, lambda ctx: (ctx.hook_point.name, ctx.step, ctx.model[0].weight.clone()), *STEP_POINTS)
    run = train_mixed("fp16", Case(loop=loop), [spy], steps=3, scale=float("inf"))
    assert run.state.loop.skipped_steps == 3
    assert all(torch.equal(weight, calls[0][2]) for _, _, weight in calls)
    steps = [(name, step) for name, step, _ in calls]
    assert steps == [(name, step) for step in (1, 2, 3) for name in ("PRE_STEP", "POST_BACKWARD")]


def test_loss_scale_falls_and_scheduler_waits_when_skipping() -> None:
    run = train_mixed("fp16", Case("tied", loop="step"), steps=20, scale=2.0**30)
    loop = run.state.loop
    assert 0 < loop.skipped_steps < 20
    assert run.task.scaler.get_scale() == 2.0 ** (30 - loop.skipped_steps)
    assert run.task.scheduler.last_epoch == 20 - loop.skipped_steps
    assert all(parameter.isfinite().all() for parameter in run.task.model.parameters())


@pytest.mark.longer
def test_mean_gradient_excludes_skipped_steps() -> None:
    class MeanGradientRecorder(at(SpyHook, HookPoint.POST_EPOCH)):
        needs_grads = True

    means: list[dict[str, Tensor] | None] = []
    mean_gradients = MeanGradientRecorder(
        lambda ctx: means.append(ctx.accumulated_grads and dict(ctx.accumulated_grads))
    )
    run = train_mixed("fp16", Case("tied"), [mean_gradients], steps=30, scale=2.0**30)
    assert run.state.loop.skipped_steps > 3
    assert means[0] is None
    assert all(value.isfinite().all() for value in means[-1].values())


def test_measured_gradient_is_finite_at_any_loss_scale() -> None:
    """The steps of the run overflow and are skipped."""
    measured: list[dict[str, Tensor]] = []
    hook = at(SpyHook, POST_BACKWARD)(lambda ctx: measured.append(ctx.compute_batch_gradients(ctx.batch_data)))
    run = train_mixed("fp16", Case("tied"), [hook], steps=3, scale=2.0**40)
    assert run.state.loop.skipped_steps == 3
    assert all(value.isfinite().all() for vector in measured for value in vector.values())


def test_context_exposes_the_loss_scale() -> None:
    """ctx.loss_scale is None outside the backward pass."""
    scales: list[float | None] = []
    spy = recorder(scales, lambda ctx: ctx.loss_scale, HookPoint.PRE_STEP, POST_BACKWARD, HookPoint.POST_EPOCH)
    train_mixed("fp16", Case("tied"), [spy], scale=2.0**40)
    assert scales == [None, 2.0**40, None, 2.0**39, None, 2.0**38, None]


class Narrow(nn.Module):
    """Records the dtype of its output."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.dtypes: list[torch.dtype] = []

    def forward(self, inputs: Tensor) -> Tensor:
        output = self.linear(inputs)
        self.dtypes.append(output.dtype)
        return output


@pytest.mark.parametrize(("amp", "dtype"), [("none", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_losses_use_the_requested_precision(amp: str, dtype: torch.dtype) -> None:
    model = Narrow()
    Precision.of(amp, torch.device("cpu")).autocast(partial(model))(torch.ones(1, 3))
    assert model.dtypes == [dtype]
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.longer
@pytest.mark.some_rows(2)
@pytest.mark.parametrize("runner", [Small, SmallSteps])
@pytest.mark.parametrize("amp", ["bf16", "fp16"])
def test_experiment_trains_in_mixed_precision(tmp_path: Path, amp: str, runner: type[Small]) -> None:
    with registered(runner):
        summary = session(tmp_path, runner, strategies=["plain"], amp=amp).run()[0]
    config = read_json(tmp_path / runner.name / "plain/experiment_config.json")
    assert (config["config"]["amp"], summary["status"]) == (amp, "completed")
    assert summary["final"]["val_loss"] < summary["initial"]["val_loss"]
    assert summary["skipped_steps"] == 0
