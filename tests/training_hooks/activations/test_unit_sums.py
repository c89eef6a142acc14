"""Statistics of activations against NumPy in float64, closed forms and planted units."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from loopscope.training_hooks.activations.unit_sums import (
    MASSIVE_MAGNITUDE,
    UnitSums,
    dead_fraction,
    dormant_fraction,
    largest_magnitude,
    massive_count,
    nonfinite_fraction,
    outlier_kurtosis,
    root_mean_square,
    tokens_by_units,
)


def drawn(seed: int, tokens: int, units: int) -> torch.Tensor:
    return torch.randn(tokens, units, generator=torch.Generator().manual_seed(seed))


@pytest.mark.longer
@given(st.integers(0, 10**6), st.integers(2, 9), st.integers(1, 9), st.integers(-126, 120), st.integers(1, 4))
def test_statistics_match_numpy_at_every_scale(seed, tokens, units, exponent, parts):
    """The sums of parts are those of the whole, from the smallest normal number to near the largest."""
    values = drawn(seed, tokens, units) * 2.0**exponent
    sums, *others = [UnitSums.of(part) for part in values.chunk(parts)]
    for other in others:
        sums = sums.add(other)
    exact = values.double().numpy()
    sizes = np.sqrt((exact**2).mean(0))
    assert root_mean_square(sums).item() == pytest.approx(math.sqrt((exact**2).mean()), rel=1e-5)
    assert largest_magnitude(sums).item() == np.abs(exact).max()
    kurtosis = (sizes**4 / sizes.max() ** 4).mean() / (sizes**2 / sizes.max() ** 2).mean() ** 2
    assert outlier_kurtosis(sums).item() == pytest.approx(kurtosis, rel=1e-5)
    means = np.abs(exact).mean(0)
    assert dormant_fraction(sums, 0.3).item() == pytest.approx((means <= 0.3 * means.mean()).mean(), abs=1e-9)
    assert dead_fraction(sums).item() == 0.0


@pytest.mark.parametrize("units", [2, 16, 300])
@pytest.mark.parametrize("factor", [1.0, 10.0, 1e4])
def test_kurtosis_of_one_scaled_unit(units, factor):
    """Of units with size 1 and one with size c, it is d(d − 1 + c⁴)/(d − 1 + c²)²."""
    values = torch.ones(8, units) * torch.tensor([1.0, -1.0]).repeat(4)[:, None]
    values[:, 0] *= factor
    expected = units * (units - 1 + factor**4) / (units - 1 + factor**2) ** 2
    assert outlier_kurtosis(UnitSums.of(values)).item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("function", "value"), [(torch.relu, -9.0), (torch.tanh, 40.0), (torch.sigmoid, -200.0)])
def test_planted_dead_units_are_counted(function, value):
    """Three of eight units have the input of the flat side for every token."""
    inputs = drawn(0, 20, 8)
    inputs[:, :3] = value
    assert dead_fraction(UnitSums.of(function(inputs))).item() == 3 / 8


def test_unit_of_one_token_is_not_dead():
    values = torch.zeros(20, 4)
    values[7, 1] = 1.0
    assert dead_fraction(UnitSums.of(values)).item() == 3 / 4
    assert math.isnan(dead_fraction(UnitSums.of(values[:1])).item())


def test_dormant_units_are_below_the_threshold():
    """Two units have a mean magnitude of 0.01 times that of the layer, with either sign."""
    values = drawn(1, 50, 10)
    values[:, 4:6] *= 0.01
    assert dormant_fraction(UnitSums.of(values), 0.025).item() == 0.2


@pytest.mark.parametrize(("planted", "count"), [(50.0, 0), (150.0, 2), (-5000.0, 2)])
def test_massive_activations_exceed_both_limits(planted, count):
    """Two elements are planted in values with a median magnitude of about 0.07."""
    values = drawn(2, 64, 32) * 0.1
    values[3, 5] = values[9, 5] = planted
    assert massive_count(UnitSums.of(values)).item() == count
    assert massive_count(UnitSums.of(values * 100)).item() == count
    assert MASSIVE_MAGNITUDE == 100


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nonfinite_elements_are_counted(bad):
    values = drawn(3, 5, 4)
    values[2, 1] = bad
    sums = UnitSums.of(values)
    assert nonfinite_fraction(sums).item() == 1 / 20
    assert not math.isfinite(root_mean_square(sums).item())
    assert math.isnan(dormant_fraction(sums, 0.1).item())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes_are_measured_as_stored(dtype):
    """Half precision is widened before any sum."""
    values = (drawn(4, 6, 5) * 200).to(dtype)
    sums = UnitSums.of(values)
    assert root_mean_square(sums).item() == pytest.approx(values.double().square().mean().sqrt().item(), rel=1e-6)


def test_units_are_the_channels_of_images():
    images = drawn(5, 24, 12).reshape(2, 3, 4, 12)
    tokens = tokens_by_units((images, "rest"))
    assert tokens.shape == (2 * 4 * 12, 3)
    assert torch.equal(tokens[:, 1], images[:, 1].flatten())
    assert tokens_by_units({"hidden": drawn(5, 6, 2).reshape(2, 3, 2)}).shape == (6, 2)
    assert tokens_by_units((torch.arange(3), None)) is None


@pytest.mark.parametrize("period", [16, 128, 512])
@pytest.mark.parametrize("units", [1024, 768])
def test_sampled_median_has_no_period_of_units(period, units):
    """Units that are dead at every k-th place do not decide the median of a large output."""
    values = torch.randn(2048, units, generator=torch.Generator().manual_seed(0)).abs() + 1
    values[:, ::period] = 0
    values[:, 5] = 150.0
    assert massive_count(UnitSums.of(values)) == 0
    values[3, 7] = 5000.0
    assert massive_count(UnitSums.of(values)) == 1


def test_sums_over_no_tokens_change_nothing():
    values = torch.randn(5, 3, dtype=torch.float64)
    sums, joined = UnitSums.of(values), UnitSums.empty(3, torch.device("cpu")).add(UnitSums.of(values))
    assert all(torch.equal(getattr(sums, name), getattr(joined, name)) for name in vars(sums))
