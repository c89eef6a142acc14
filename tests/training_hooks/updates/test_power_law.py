"""Fits of a power law to samples with a known exponent, and against an exhaustive search with SciPy."""

import math

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from loopscope.training_hooks.updates import weight_tracking
from loopscope.training_hooks.updates.weight_tracking import fit_power_law
from scipy import stats


def pareto(exponent: float, shape: tuple[int, ...], seed: int, start: float = 1.0) -> torch.Tensor:
    """Draw from p(x) ∝ x^−exponent, x ≥ start, and sort in descending order."""
    uniform = torch.rand(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return (start * uniform ** (-1 / (exponent - 1))).sort(dim=-1, descending=True).values


def fit_exhaustively(sample: np.ndarray, min_tail: int) -> dict[int, tuple[float, float]]:
    """Return exponent and distance of the best fits by length of the tail; several if they are equally good.

    Tries every start, with the exponent from SciPy's fit and the distance from SciPy's test of a Pareto law.
    """
    fits = {}
    for start in np.unique(sample[sample > 0]):
        tail = sample[sample >= start]
        if len(tail) >= min_tail and tail.max() > start:
            shape, _, _ = stats.pareto.fit(tail, floc=0, fscale=start)
            fits[len(tail)] = 1 + shape, stats.kstest(tail, stats.pareto(shape, scale=start).cdf).statistic
    least = min((distance for _, distance in fits.values()), default=math.nan)
    return {count: fit for count, fit in fits.items() if fit[1] <= least * (1 + 1e-9)}


@pytest.mark.some_rows(3)
@pytest.mark.parametrize("exponent", [1.5, 2.0, 3.0, 4.5])
@pytest.mark.parametrize("size", [100, 1000])
def test_planted_exponent_is_recovered(exponent, size):
    """The fitted exponent is within four standard errors of the planted one."""
    fit = fit_power_law(pareto(exponent, (20, size), seed=size), min_tail=20)
    errors = (exponent - 1) / fit.count.sqrt()
    assert ((fit.exponent - exponent).abs() < 4 * errors).all()
    assert fit.count.mean() > size / 2
    assert (fit.distance < 1.36 / fit.count.sqrt()).all()


def test_tail_starts_at_the_planted_minimum():
    noise = torch.rand(4, 600, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 4
    sample = torch.cat([pareto(2.5, (4, 400), seed=2, start=5.0), noise], dim=1).sort(dim=1, descending=True).values
    fit = fit_power_law(sample, min_tail=20)
    assert ((fit.exponent - 2.5).abs() < 4 * 1.5 / fit.count.sqrt()).all()
    assert (fit.count <= 400).all()


@settings(deadline=None, max_examples=25)
@example(20, 2, "ties", 44)
@given(
    st.integers(2, 40), st.sampled_from([2, 5, 10]), st.sampled_from(["pareto", "normal", "ties"]), st.integers(0, 99)
)
def test_fits_match_exhaustive_search(size, min_tail, kind, seed):
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(size, dtype=torch.float64, generator=generator).square()
    draws = {"pareto": pareto(2.2, (size,), seed), "normal": normal, "ties": (normal * 3).ceil()}
    sample = draws[kind].sort(descending=True).values
    best = fit_exhaustively(sample.numpy(), min_tail)
    assume(best)
    fit = fit_power_law(sample[None], min_tail)
    exponent, distance = best[int(fit.count)]
    assert fit.distance.item() == pytest.approx(distance, rel=1e-6)
    assert fit.exponent.item() == pytest.approx(exponent, rel=1e-5)


@settings(deadline=None, max_examples=30)
@given(st.floats(1e-20, 1e20), st.integers(0, 99))
def test_fit_is_invariant_under_scaling(scale, seed):
    sample = pareto(3.0, (2, 30), seed)
    plain, scaled = fit_power_law(sample, 10), fit_power_law(sample * scale, 10)
    torch.testing.assert_close(scaled.exponent, plain.exponent, rtol=1e-6, atol=0)
    assert torch.equal(scaled.count, plain.count)


def test_batched_fits_match_single_fits(monkeypatch):
    """Fits of several samples together are the same for any block size."""
    samples = pareto(2.5, (3, 50), seed=4)
    batched = fit_power_law(samples, 10)
    monkeypatch.setattr(weight_tracking, "BLOCK_ELEMENTS", 400)
    single = [fit_power_law(sample[None], 10) for sample in samples]
    assert torch.equal(batched.exponent, torch.cat([fit.exponent for fit in single]))
    assert torch.equal(batched.distance, torch.cat([fit.distance for fit in single]))


def test_zeros_and_rounding_errors_start_no_tail():
    sample = pareto(2.0, (1, 40), seed=5)
    padded = torch.cat([sample, torch.full((1, 20), 1e-17), torch.zeros(1, 20)], dim=1)
    assert torch.equal(fit_power_law(padded, 10).exponent, fit_power_law(sample, 10).exponent)


@pytest.mark.parametrize(
    "sample",
    [torch.ones(1, 20), torch.zeros(1, 20), torch.ones(1, 5), torch.full((1, 20), math.nan)],
    ids=["all equal", "all zero", "too few", "not numbers"],
)
def test_samples_without_tail_get_no_fit(sample):
    fit = fit_power_law(sample, min_tail=10)
    assert fit.exponent.isnan()
    assert fit.distance.isnan()
    assert fit.count.isnan()
