"""Which gradients and updates the hook weight_updates reports as faults, and which as remarks."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
import torch
from loopscope.doctor import all_detectors
from loopscope.hooks import Alert, HookPoint, OptimizerGroup, RunDataContext
from loopscope.training_hooks.gradients import gradient_flow
from loopscope.training_hooks.progress import loss_spikes
from loopscope.training_hooks.updates import WeightUpdates, weight_updates
from torch import nn

from tests.training_hooks.epoch_end import epoch_end

IDS_OF_HOOKS = {*weight_updates.IDS.values(), *loss_spikes.IDS.values(), *gradient_flow.IDS.values()}
Sizes = Callable[[int], Mapping[str, float]]


def context(model: nn.Module, point: HookPoint, step: int, lr: float) -> RunDataContext:
    ctx = epoch_end(model, hook_point=point, step=step)
    group = OptimizerGroup(tuple(dict(model.named_parameters())), lr, 0.0, None, {})
    return replace(ctx, services=replace(ctx.services, optimizer_groups=lambda: (group,)))


def check(sizes: Sizes, *, checks: int = 5, lr: float = 0.1, moves: bool = True) -> list[Alert]:
    """Check a layer whose gradients have a given size at each step (default: 1), and return the alerts."""
    model, hook, alerts = nn.Linear(3, 2), WeightUpdates(interval=1), []
    for step in range(1, checks + 1):
        for name, parameter in model.named_parameters():
            parameter.grad = torch.full_like(parameter, sizes(step).get(name, 1.0))
        hook.compute(context(model, HookPoint.POST_BACKWARD, step, lr))
        for parameter in model.parameters() if moves else ():
            parameter.data -= 0.01
        hook.compute(context(model, HookPoint.POST_STEP, step, lr))
        alerts += hook.check({}, step)
    return alerts


def severities(alerts: list[Alert]) -> list[tuple[int, str, str]]:
    return [(alert.step, alert.severity, alert.id) for alert in alerts if "no parameter" not in str(alert)]


def test_matrix_without_lasting_gradient_is_a_fault():
    """At the first check it may be a factor of LoRA."""
    lasting = severities(check(lambda step: {"weight": 0.0}))
    assert lasting == [(1, "info", "vanishing-gradients"), (2, "warning", "vanishing-gradients")]
    assert severities(check(lambda step: {"weight": float(step > 1)})) == [(1, "info", "vanishing-gradients")]


def test_tiny_gradient_is_a_fault_at_once():
    assert severities(check(lambda step: {"weight": 1e-9})) == [(1, "warning", "vanishing-gradients")]


def test_bias_alone_without_gradient_is_no_condition():
    """A normalisation after the layer removes the effect of its bias; a layer without gradients is a condition."""
    assert check(lambda step: {"bias": 1e-9}) == []
    (frozen,) = check(lambda step: {"bias": 0.0}, moves=False)
    assert "1 of 2 parameters is frozen: weight" in str(frozen)
    both = check(lambda step: {"bias": 1e-9, "weight": 1e-9}, checks=1)
    assert [str(alert) for alert in both if "2 of 2 parameters have vanishing gradients" in str(alert)]
    deep = check(lambda step: {"bias": 3e-8, "weight": 1e-7}, checks=1)  # ‖g‖: 4e-8 and 2e-7
    assert severities(deep) == [(1, "info", "vanishing-gradients")]


def test_small_gradients_of_a_solved_task_are_remarks():
    """They are a fault if the model never had larger ones."""
    solved = check(lambda step: {} if step == 1 else {"weight": 1e-9, "bias": 1e-9})
    assert {alert.severity for alert in solved} == {"info"}
    dead = check(lambda step: {"weight": 1e-9, "bias": 0.0})
    assert [alert.severity for alert in dead] == ["info", "warning"]


def test_gradients_that_became_large_are_a_fault():
    """A sum over tokens makes them large from the start."""
    assert severities(check(lambda step: {"weight": 1e3})) == [(1, "info", "exploding-gradients")]
    grown = severities(check(lambda step: {"weight": 1e3 if step > 3 else 1.0}))
    assert grown == [(4, "warning", "exploding-gradients")]


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_nonfinite_gradient_is_critical(value):
    assert severities(check(lambda step: {"weight": value if step == 2 else 1.0})) == [(2, "critical", "nonfinite")]


@pytest.mark.parametrize(("lr", "severity"), [(0.1, "warning"), (0.0, "info"), (math.nan, "warning")])
def test_frozen_parameters_with_learning_rate_are_a_fault(lr, severity):
    """It is NaN if no optimizer has the parameter."""
    assert severities(check(lambda step: {}, lr=lr, moves=False)) == [(3, severity, "optimizer-without-effect")]


def test_frozen_parameter_without_gradient_is_a_remark():
    frozen = check(lambda step: {"weight": 0.0, "bias": 0.0}, moves=False)
    assert {alert.severity for alert in frozen if alert.metric == "frozen"} == {"info"}


def rounding(gain_only: bool, rates: Mapping[int, float]) -> list[str]:
    """Return the severities for bfloat16 weights of which a gain, or all, lose their update, by check."""
    model, hook, alerts = nn.Linear(3, 2).bfloat16(), WeightUpdates(interval=1), []
    model.bias.data.fill_(1.0)
    for step, lr in rates.items():
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        hook.compute(context(model, HookPoint.POST_BACKWARD, step, lr))
        if gain_only:
            model.weight.data -= 0.1
        hook.compute(context(model, HookPoint.POST_STEP, step, lr))
        alerts += hook.check({}, step)
    return [alert.severity for alert in alerts]


def test_lost_updates_of_a_gain_are_a_remark():
    """They are a fault if most of the model loses its updates."""
    assert rounding(gain_only=True, rates=dict.fromkeys(range(1, 5), 1e-3)) == ["info"]
    assert rounding(gain_only=False, rates=dict.fromkeys(range(1, 5), 1e-3)) == ["info", "warning"]


def test_lost_updates_in_a_decay_are_remarks():
    assert rounding(gain_only=False, rates={1: 1e-3, 2: 5e-5, 3: 5e-5, 4: 5e-5}) == ["info"]


def test_ids_of_alerts_are_those_of_findings():
    assert {detector.name for detector in all_detectors()} >= IDS_OF_HOOKS
