import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from loopscope.engine.hook_calls import optimizer_groups
from loopscope.training_hooks.curvature.measured_loss import critical_step
from loopscope.training_hooks.curvature.stability import adam_preconditioner, stability_threshold, steps_taken
from torch import nn

LR = 0.01


def grows(optimizer_class, curvature: float, steps: int = 4000, **options) -> bool:
    """Return whether an optimizer diverges from the minimum of ½λx²."""
    model = nn.ParameterDict({"x": nn.Parameter(torch.ones(1, dtype=torch.float64))})
    optimizer = optimizer_class(model.parameters(), lr=LR, **options)
    for _ in range(steps):
        model["x"].grad = curvature * model["x"].detach()
        optimizer.step()
        if abs(model["x"].item()) > 1e6:
            return True
    return False


def threshold(optimizer_class, **options) -> float | None:
    model = nn.Linear(2, 2)
    optimizer = optimizer_class(model.parameters(), lr=LR, **options)
    return stability_threshold(optimizer_class, optimizer_groups(model, optimizer))


@pytest.mark.longer
@pytest.mark.some_rows(3)
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, 2 / LR),
        ({"momentum": 0.9}, 3.8 / LR),
        ({"momentum": 0.9, "dampening": 0.9}, 38 / LR),
        ({"momentum": 0.9, "dampening": 0.5}, 7.6 / LR),
        ({"momentum": 0.9, "nesterov": True}, 3.8 / 2.8 / LR),
        ({"weight_decay": 50.0}, 2 / LR - 50),
        ({"momentum": 0.9, "weight_decay": 50.0}, 3.8 / LR - 50),
        ({"momentum": 0.9, "nesterov": True, "weight_decay": 50.0}, 3.8 / 2.8 / LR - 50),
    ],
)
def test_sgd_diverges_above_its_threshold_and_not_below(options, expected):
    found = threshold(torch.optim.SGD, **options)
    assert found == pytest.approx(expected)
    assert grows(torch.optim.SGD, found * 1.01, **options)
    assert not grows(torch.optim.SGD, found * 0.99, **options)


@pytest.mark.longer
@pytest.mark.some_rows(2)
@pytest.mark.parametrize("beta", [0.0, 0.5, 0.9])
def test_adam_diverges_only_above_its_threshold(beta):
    """With a constant preconditioner, 2 percent above the threshold diverges and 2 percent below does not."""
    found = threshold(torch.optim.AdamW, betas=(beta, 0.999))
    assert found == pytest.approx((2 + 2 * beta) / ((1 - beta) * LR))
    constant = {"betas": (beta, 0.0), "eps": 1.0, "weight_decay": 0.0}
    scale = 1e-30  # of the gradient, so that ε = 1 is the preconditioner, also while the bias correction is large

    def runs_away(curvature: float) -> bool:
        model = nn.ParameterDict({"x": nn.Parameter(torch.full((1,), scale, dtype=torch.float64))})
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR, **constant)
        for _ in range(1500):
            model["x"].grad = curvature * model["x"].detach()
            optimizer.step()
        return abs(model["x"].item()) > scale

    assert runs_away(found * 1.02)
    assert not runs_away(found * 0.98)


@pytest.mark.parametrize("beta", [0.5, 0.9])
def test_early_adam_threshold_includes_bias_correction(beta):
    """At the threshold, the matrix of one bias-corrected step on the pair (x, m) has the eigenvalue −1."""
    model = nn.Linear(2, 2)
    groups = optimizer_groups(model, torch.optim.Adam(model.parameters(), lr=LR, betas=(beta, 0.999)))
    for steps in (1, 3, 10):
        found = stability_threshold(torch.optim.Adam, groups, steps)
        # x ← x − a·m, m ← βm + (1 − β)λx, a = η/(1 − βᵗ) the present step: at the threshold −1 is an eigenvalue.
        a = LR / (1 - beta**steps)
        for factor, stable in ((0.99, True), (1.01, False)):
            curvature = factor * found
            matrix = np.array([[1 - a * (1 - beta) * curvature, -a * beta], [(1 - beta) * curvature, beta]])
            assert (np.abs(np.linalg.eigvals(matrix)).max() < 1) == stable


def test_divergent_weight_decay_leaves_no_threshold():
    assert threshold(torch.optim.SGD, weight_decay=2.1 / LR) is None


def test_step_count_is_that_of_oldest_parameter():
    """The count is the largest one in the optimizer state, or zero without state."""
    assert steps_taken({}) == 0
    assert steps_taken({"a": {"step": torch.tensor(3.0)}, "b": {"step": 7}, "c": {}}) == 7


def test_default_adam_threshold_is_38_over_lr():
    """The learning rate is the only free quantity at beta 0.9."""
    assert threshold(torch.optim.Adam) == pytest.approx(38 / LR)


def test_unknown_thresholds_are_none():
    assert threshold(torch.optim.RMSprop) is None
    model = nn.Linear(2, 2)
    for rates in ([0.1, 0.2], [0.0, 0.0]):
        groups = [{"params": [model.weight], "lr": rates[0]}, {"params": [model.bias], "lr": rates[1]}]
        assert stability_threshold(torch.optim.SGD, optimizer_groups(model, torch.optim.SGD(groups))) is None


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("optimizer_class", [torch.optim.Adam, torch.optim.AdamW])
def test_preconditioner_matches_adam_denominator(optimizer_class, amsgrad):
    torch.manual_seed(0)
    model = nn.Linear(3, 2).double()
    model.unused = nn.Linear(1, 1)
    options = {"betas": (0.0, 0.9), "eps": 1e-3, "weight_decay": 0.0, "amsgrad": amsgrad}
    optimizer = optimizer_class(model.parameters(), lr=LR, **options)
    for scale in (2.0, 1.0, 0.1):
        before = model.weight.detach().clone()
        model.weight.grad = scale * torch.randn(2, 3, dtype=torch.float64)
        optimizer.step()
    states = {name: optimizer.state[value] for name, value in model.named_parameters() if value in optimizer.state}
    found = adam_preconditioner(states, optimizer_groups(model, optimizer))
    assert found.keys() == {"weight"}
    torch.testing.assert_close(-LR * model.weight.grad / found["weight"], model.weight.detach() - before)


@pytest.mark.longer
@given(st.floats(1e-4, 1e4), st.floats(1e-2, 1e2))
def test_critical_step_matches_the_parabola_root(crossing, curvature):
    """The search uses exactly 20 evaluations."""
    calls: list[float] = []

    def rise(step):
        calls.append(step.item())
        return curvature * step * (step - crossing)

    found = critical_step(rise, torch.tensor(1.0, dtype=torch.float64), 20)
    bracketing = math.floor(abs(math.log(crossing, 4))) + 2
    assert len(calls) == 20
    assert abs(math.log2(found.item() / crossing)) <= 2.0 ** -(20 - bracketing) + 1e-9


def test_unreachable_critical_step_is_nan():
    first = torch.tensor(1.0)
    assert critical_step(lambda step: -step, first, 8).isnan()
    assert critical_step(lambda step: step, first, 8).isnan()
    assert critical_step(lambda step: step - 4**5, first, 5).isnan()
    assert critical_step(lambda step: step - 4**5, first, 12).item() == pytest.approx(4**5, rel=0.03)


def test_nonfinite_loss_counts_as_a_rise():
    def rise(step):
        return torch.where(step > 3, math.nan, torch.where(step > 2, math.inf, -step))

    assert critical_step(rise, torch.tensor(1.0), 15).item() == pytest.approx(2, rel=1e-3)
