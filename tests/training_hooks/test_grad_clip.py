import math

import pytest
import torch

from framework.errors import UsageError
from framework.hook_points import HookPoint
from framework.manager import HookManager
from framework.train_step import TrainingTask, forward_backward, update
from tests.support import MODELS, OPTIMIZERS, Case, build, train
from training_hooks.grad_clip import GradClip

STEPS = 6


def hand_written(case: Case, max_norm: float) -> tuple[TrainingTask, list[float]]:
    """Train with ``clip_grad_norm_`` between backward and update; return the norms before it."""
    task, _ = build(case, steps=STEPS)
    norms = []
    for epoch in range(STEPS // len(task.loader)):
        for batch in task.loader.batches(epoch):
            forward_backward(task, batch)
            norms.append(torch.nn.utils.clip_grad_norm_(task.model.parameters(), max_norm).item())
            update(task, step_scheduler=False)
        task.scheduler.step()
    return task, norms


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("model", MODELS)
def test_the_run_is_bit_for_bit_the_one_that_calls_clip_grad_norm(model, optimizer):
    case = Case(model, optimizer)
    typical = sorted(hand_written(case, math.inf)[1])[STEPS // 2]
    task, norms = hand_written(case, typical)
    run = train(case, [GradClip(max_norm=typical)], steps=STEPS)
    for expected, found in zip(task.model.parameters(), run.task.model.parameters(), strict=True):
        assert torch.equal(expected, found)
    assert [row[3] for row in run.sink.rows("grad_clip/norm_before")] == norms
    assert 0 < sum(row[3] for row in run.sink.rows("grad_clip/clipped")) < STEPS


def test_the_metrics_describe_what_happened_to_the_norm():
    free = [row[3] for row in train(Case(), [GradClip(max_norm=1e9)]).sink.rows("grad_clip/norm_before")]
    run = train(Case(), [GradClip(max_norm=free[0] / 4)], steps=1)
    values = {
        name.removeprefix("grad_clip/"): value for name, _, step, value in run.sink.rows("grad_clip") if step == 1
    }
    assert values["norm_before"] == free[0]
    assert values["norm_after"] == pytest.approx(free[0] / 4, rel=1e-5)
    assert values["coefficient"] == pytest.approx(0.25, rel=1e-5)
    assert values["clipped"] == 1.0
    assert values.keys() == {info.name for info in GradClip().describe_metrics()}


def test_gradients_within_the_norm_are_left_bit_for_bit():
    loose, bare = train(Case(), [GradClip(max_norm=1e9)]), train(Case())
    assert loose.final == bare.final
    assert {row[3] for row in loose.sink.rows("grad_clip/clipped")} == {0.0}


def test_float16_gradients_whose_norm_float16_cannot_hold_are_scaled_not_erased():
    task, state = build(Case("transformer"))
    for parameter in task.model.half().parameters():
        parameter.grad = torch.full_like(parameter, 3000.0)
    count = sum(parameter.numel() for parameter in task.model.parameters())
    assert 3000 * math.sqrt(count) > torch.finfo(torch.float16).max
    HookManager([GradClip(max_norm=100.0)], task, state).fire(HookPoint.POST_BACKWARD)
    for parameter in task.model.parameters():
        torch.testing.assert_close(parameter.grad, torch.full_like(parameter, 100 / math.sqrt(count)))


@pytest.mark.parametrize("max_norm", [0.0, -1.0, math.inf, math.nan])
def test_a_norm_that_cannot_be_a_limit_is_refused(max_norm):
    with pytest.raises(UsageError, match=f"grad_clip.max_norm is {max_norm}; it must be a positive number"):
        GradClip(max_norm=max_norm)
