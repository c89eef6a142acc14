"""Formats: every number and every tie, against decoded codes and ml_dtypes; saturation, signs, the continued grid."""

import ml_dtypes
import numpy as np
import pytest
import torch
from loopscope.errors import UsageError
from loopscope.lowbit.casts import FloatFormat, FormatRegistry
from loopscope.lowbit.casts.formats import check_format, to_continued_grid, to_grid
from torch import Tensor

from tests.framework.lowbit.casts.brute_force import decoded, nearest, ties

TYPES = {
    "e2m1": ml_dtypes.float4_e2m1fn,
    "e2m3": ml_dtypes.float6_e2m3fn,
    "e3m2": ml_dtypes.float6_e3m2fn,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
}
every_format = pytest.mark.parametrize("name", FormatRegistry.names())
every_width = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])


def same(found: Tensor, expected: Tensor) -> bool:
    """Compare numbers and signs of zeros."""
    return torch.equal(found, expected) and torch.equal(found.signbit(), expected.signbit())


def around(values: list[float], dtype: torch.dtype) -> Tensor:
    """Return the values with the next number on each side, and all that negated."""
    exact = torch.tensor(values, dtype=dtype)
    ends = [torch.full_like(exact, end) for end in (-torch.inf, torch.inf)]
    found = torch.cat([exact, *(torch.nextafter(exact, end) for end in ends)])
    return torch.cat([found, -found])


def in_range(name: str, count: int, seed: int) -> Tensor:
    """Draw float32 numbers whose exponents are even over the format's range and some way below it."""
    found = FormatRegistry.get(name)
    generator = torch.Generator().manual_seed(seed)
    low = np.log2(found.smallest_normal()) - found.mantissa_bits - 3
    exponents = torch.empty(count).uniform_(low, np.log2(found.maximum), generator=generator)
    signs = torch.randint(0, 2, (count,), generator=generator) * 2 - 1
    return exponents.exp2().clamp_max(found.maximum) * signs


def by_ml_dtypes(name: str, values: Tensor) -> Tensor:
    return torch.from_numpy(values.numpy().astype(TYPES[name]).astype(np.float32))


@every_format
def test_magnitudes_match_decoded_codes(name):
    assert FormatRegistry.get(name).magnitudes().tolist() == decoded(FormatRegistry.get(name))


def test_the_magnitudes_of_e2m1_are_the_published_ones():
    assert FormatRegistry.get("e2m1").magnitudes().tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def test_e2m1_ties_round_as_specified():
    """Each tie rounds to the neighbor with the even code."""
    halves = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    assert to_grid(halves, FormatRegistry.get("e2m1")).tolist() == [0, 1, 1, 2, 2, 4, 4]


@pytest.mark.parametrize("name", TYPES)
def test_magnitudes_match_ml_dtypes(name):
    bits = 1 + FormatRegistry.get(name).exponent_bits + FormatRegistry.get(name).mantissa_bits
    numbers = np.arange(2**bits, dtype=np.uint8).view(TYPES[name]).astype(np.float64)
    expected = np.unique(np.abs(numbers[np.isfinite(numbers)]))
    assert FormatRegistry.get(name).magnitudes().tolist() == expected.tolist()
    assert FormatRegistry.get(name).maximum == float(ml_dtypes.finfo(TYPES[name]).max)


@every_format
@every_width
def test_format_numbers_do_not_change(name, dtype):
    numbers = FormatRegistry.get(name).magnitudes().to(dtype)
    for values in (numbers, -numbers):
        assert same(to_grid(values, FormatRegistry.get(name)), values)
        assert same(to_continued_grid(values, FormatRegistry.get(name)), values)


@every_format
@every_width
@pytest.mark.parametrize("rounding", [to_grid, to_continued_grid])
def test_ties_and_neighbors_match_brute_force(name, dtype, rounding):
    """The test rounds in every format, input dtype and grid."""
    grid = decoded(FormatRegistry.get(name))
    values = around([*grid, *ties(grid)], dtype)
    values = values[values.abs() <= grid[-1]]
    expected = torch.tensor([nearest(value, grid) for value in values.tolist()], dtype=dtype)
    assert same(rounding(values, FormatRegistry.get(name)), expected)


@pytest.mark.parametrize("name", TYPES)
def test_ties_and_neighbors_match_ml_dtypes(name):
    values = around([*decoded(FormatRegistry.get(name)), *ties(decoded(FormatRegistry.get(name)))], torch.float32)
    values = values[values.abs() <= FormatRegistry.get(name).maximum]
    assert same(to_grid(values, FormatRegistry.get(name)), by_ml_dtypes(name, values))


@pytest.mark.parametrize("name", TYPES)
def test_random_numbers_round_as_ml_dtypes_does(name):
    values = in_range(name, 100_000, seed=1)
    assert same(to_grid(values, FormatRegistry.get(name)), by_ml_dtypes(name, values))


@pytest.mark.slow
@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("seed", range(4))
def test_millions_of_random_numbers_match_ml_dtypes(name, seed):
    """The test rounds four million numbers for each seed and format."""
    values = in_range(name, 4_000_000, seed=seed)
    assert same(to_grid(values, FormatRegistry.get(name)), by_ml_dtypes(name, values))


@pytest.mark.slow
@every_format
def test_every_bfloat16_number_rounds_as_by_brute_force(name):
    values = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16).float()
    values = values[~values.isnan()]
    grid = decoded(FormatRegistry.get(name))
    expected = torch.tensor([nearest(value, grid) for value in values.tolist()])
    assert same(to_grid(values, FormatRegistry.get(name)), expected)


@every_format
@every_width
def test_beyond_the_largest_number_values_saturate(name, dtype):
    limit = FormatRegistry.get(name).maximum
    beyond = torch.tensor([limit * 1.001, limit * 2, torch.finfo(dtype).max, torch.inf], dtype=dtype)
    assert to_grid(beyond, FormatRegistry.get(name)).tolist() == [limit] * 4
    assert to_grid(-beyond, FormatRegistry.get(name)).tolist() == [-limit] * 4


@every_format
@every_width
@pytest.mark.parametrize("rounding", [to_grid, to_continued_grid])
def test_nan_stays_nan_and_zeros_keep_their_sign(name, dtype, rounding):
    tiny = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    values = torch.tensor([torch.nan, 0.0, -0.0, tiny, -tiny], dtype=dtype)
    found = rounding(values, FormatRegistry.get(name))
    assert found.isnan().tolist() == [True, False, False, False, False]
    assert same(found[1:], torch.tensor([0.0, -0.0, 0.0, -0.0], dtype=dtype))


@every_format
def test_continued_grid_keeps_the_last_spacing(name):
    """Above the maximum of a format, the grid continues in steps of the last spacing."""
    grid = decoded(FormatRegistry.get(name))
    spacing = grid[-1] - grid[-2]
    longer = [*grid, *(grid[-1] + step * spacing for step in range(1, 50))]
    values = torch.linspace(0, longer[-2], 5001)
    expected = torch.tensor([nearest(value, longer) for value in values.tolist()])
    assert same(to_continued_grid(values, FormatRegistry.get(name)), expected)


def published(scaled: Tensor) -> Tensor:
    """Round magnitudes as Cast2Fp4e2m1 of the Metis code does, in units of a half, step by step; float64."""
    halves = scaled.abs() * 2
    halves = halves - (halves - 4).relu() / 2 - (halves - 8).relu() / 4
    halves = halves.round()
    halves = halves + (halves - 4).relu() + (halves - 6).relu() * 2
    return halves * scaled.sign() / 2


def test_continued_e2m1_grid_matches_published_formula():
    steps = torch.arange(-20_000, 20_001, dtype=torch.float64) / 512
    random = torch.randn(100_000, dtype=torch.float64, generator=torch.Generator().manual_seed(2)) * 8
    values = torch.cat([steps, random])
    assert torch.equal(to_continued_grid(values, FormatRegistry.get("e2m1")), published(values))
    assert published(torch.tensor([9.5], dtype=torch.float64)).item() == 10


def make(**attributes) -> type[FloatFormat]:
    return type("Made", (FloatFormat,), {"name": "made", "exponent_bits": 2, "mantissa_bits": 1, **attributes})


@pytest.mark.parametrize(
    ("attributes", "words"),
    [
        ({"maximum": 6.0, "name": ""}, "needs a name, 1 to 8 exponent_bits"),
        ({"maximum": 6.0, "exponent_bits": 0}, "needs a name, 1 to 8 exponent_bits"),
        ({"maximum": 6.0, "mantissa_bits": 11}, "0 to 10 mantissa_bits"),
        ({}, "'made', 0.0, is not one of its normal numbers"),
        ({"maximum": 5.0}, "'made', 5.0, is not one of its normal numbers"),
        ({"maximum": 0.5}, "'made', 0.5, is not one of its normal numbers"),
        ({"maximum": float("inf")}, "'made', inf, is not one of its normal numbers"),
    ],
)
def test_invalid_format_class_is_refused(attributes, words):
    with pytest.raises(UsageError, match=words):
        check_format(make(**attributes))


@pytest.mark.parametrize(("mantissa_bits", "maximum"), [(0, 4.0), (1, 4.0), (10, 7.0)])
def test_any_maximum_among_the_normal_numbers_is_accepted(mantissa_bits, maximum):
    found = make(mantissa_bits=mantissa_bits, maximum=maximum)
    check_format(found)
    assert found.magnitudes().tolist() == decoded(found)


def test_unknown_format_suggests_nearest_name():
    with pytest.raises(UsageError, match=r"Unknown format 'e4m4'\. Did you mean 'e4m3'"):
        FormatRegistry.get("e4m4")
