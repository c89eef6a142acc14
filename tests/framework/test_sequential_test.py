"""Judgements of pairs: the interval against its definition, its error at every look, and its power."""

import doctest
import math

import numpy as np
import pytest
import torch
from loopscope import sequential_test
from loopscope.sequential_test import SPREAD, interval_half_width, judge, pairs_needed
from loopscope.student_t import critical_t

ALPHA = 0.05


def mixture_ratio(values: np.ndarray) -> float:
    """Return the likelihood ratio of the t-statistic by integration: standardized mean N(0, SPREAD) against 0."""
    n, mean, squares = len(values), values.mean(), values.var() * len(values)
    sigmas = np.exp(np.linspace(-8, 8, 4001))[:, None]
    deltas = np.linspace(-12, 12, 2401)[None, :] * math.sqrt(SPREAD)
    likelihood = np.exp(-(squares + n * (mean - deltas * sigmas) ** 2) / (2 * sigmas**2)) * sigmas**-n
    by_delta = likelihood.sum(0)  # steps of log σ, which is the prior dσ/σ
    weights = np.exp(-(deltas[0] ** 2) / (2 * SPREAD))
    return float((by_delta * weights).sum() / weights.sum() / by_delta[len(by_delta) // 2])


@pytest.mark.longer
@pytest.mark.parametrize("pairs", [4, 7, 12])
def test_interval_ends_where_the_mixture_rejects(pairs: int) -> None:
    values = np.random.default_rng(pairs).normal(size=pairs)
    half = interval_half_width(pairs, values.std(ddof=1), ALPHA)
    assert mixture_ratio(values - values.mean() + half) == pytest.approx(1 / ALPHA, rel=1e-3)


def widths(values: np.ndarray, pairs: int) -> np.ndarray:
    return interval_half_width(pairs, 1.0, ALPHA) * values[:, :pairs].std(1, ddof=1)


@pytest.mark.longer
@pytest.mark.parametrize("kind", ["normal", "heavy"])
def test_looking_after_each_pair_keeps_the_error(kind: str) -> None:
    """Of 2,000 questions without an effect, at most 5 % are answered wrongly at any of 60 looks."""
    generator = np.random.default_rng(0)
    shape = 2000, 60
    values = generator.normal(size=shape) if kind == "normal" else generator.standard_t(3, size=shape)
    wrong = np.zeros(len(values), bool)
    for pairs in range(2, 61):
        wrong |= np.abs(values[:, :pairs].mean(1)) > widths(values, pairs)
    assert wrong.mean() <= ALPHA


def final_losses(trainings: int, seed: int) -> np.ndarray:
    """Train networks side by side on one task, each from other weights and with other batches; return their losses."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(256, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y = (x[:, :1] * x[:, 1:2]).sin()
    first = 0.5 * torch.randn(trainings, 4, 12, generator=generator, dtype=torch.float64)
    second = 0.3 * torch.randn(trainings, 12, 1, generator=generator, dtype=torch.float64)
    weights = [first.requires_grad_(), second.requires_grad_()]
    optimizer = torch.optim.SGD(weights, 0.2)
    for _ in range(60):
        rows = torch.randint(256, (trainings, 32), generator=generator)
        losses = ((x[rows] @ first).tanh() @ second - y[rows]).square().mean((1, 2))
        optimizer.zero_grad()
        losses.sum().backward()
        optimizer.step()
    with torch.no_grad():
        return np.asarray(((x @ first).tanh() @ second - y).square().mean((1, 2)))


@pytest.mark.statistical
def test_a_training_is_rarely_better_than_itself() -> None:
    """Of 200 questions about two equal trainings, at most 5 % are answered by better or worse at any of 20 looks."""
    pairs = np.asarray(final_losses(200 * 20, 1) - final_losses(200 * 20, 2)).reshape(200, 20)
    answers = [{judge(row[:n], 1e-9, ALPHA).answer for n in range(2, 21)} for row in pairs.tolist()]
    assert sum(bool(found & {"better", "worse"}) for found in answers) <= 10


@pytest.mark.longer
def test_power_is_near_that_of_one_look() -> None:
    """An effect of two deviations is found within 12 pairs, where a t-test that looks once needs 6."""
    values = np.random.default_rng(1).normal(2, 1, size=(2000, 12))
    found = np.zeros(len(values), bool)
    for pairs in range(4, 13):
        found |= np.abs(values[:, :pairs].mean(1)) > widths(values, pairs)
    at_six = values[:, :6]
    once = np.abs(at_six.mean(1)) > critical_t(5) * at_six.std(1, ddof=1) / math.sqrt(6)
    assert once.mean() > 0.95
    assert found.mean() > 0.99


@pytest.mark.parametrize(
    ("differences", "margin", "answer"),
    [
        ([0.0] * 4, 0.1, "equal"),
        ([0.01, -0.01, 0.02, -0.02, 0.0, 0.01], 0.1, "equal"),
        ([1.0, 1.1, 0.9, 1.0, 1.05], 0.1, "worse"),
        ([-1.0, -1.1, -0.9, -1.0, -1.05], 0.1, "better"),
        ([1.0, -1.0, 2.0, -2.0, 0.5], 0.1, "undecided"),
        ([0.0] * 3, 0.1, "undecided"),
        ([0.01] * 5, 0.1, "equal"),  # an effect, but smaller than what matters
    ],
)
def test_answer_follows_from_the_interval(differences: list[float], margin: float, answer: str) -> None:
    assert judge(differences, margin, ALPHA).answer == answer


def test_higher_values_can_be_better() -> None:
    assert judge([1.0, 1.1, 0.9, 1.0, 1.05], 0.1, ALPHA, lower_is_better=False).answer == "better"


@pytest.mark.parametrize(("mean", "margin"), [(0.0, 1.0), (0.3, 0.1), (0.9, 1.0)])
def test_needed_pairs_are_the_fewest_that_decide(mean: float, margin: float) -> None:
    needed = pairs_needed(mean, 1.0, margin, ALPHA)
    assert needed is not None
    resolution = max(mean, margin - mean)
    assert interval_half_width(needed, 1.0, ALPHA) < resolution <= interval_half_width(needed - 1, 1.0, ALPHA)


def test_no_number_of_pairs_sees_nothing() -> None:
    assert pairs_needed(0.0, 1.0, 1e-9, ALPHA) is None


def test_examples_are_right() -> None:
    assert doctest.testmod(sequential_test).failed == 0
