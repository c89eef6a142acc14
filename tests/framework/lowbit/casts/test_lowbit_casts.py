"""Casts: arbitrary tensors against brute force, laws, stochastic and soft rounding, errors."""

import math
import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from loopscope.errors import UsageError
from loopscope.lowbit.casts import Cast, FormatRegistry, RuleRegistry
from loopscope.lowbit.casts.formats import by_draws
from torch import Tensor

from tests.framework.lowbit.casts.brute_force import cast_by_hand, counts_by_hand, decoded, scales_of

formats, rules = st.sampled_from(FormatRegistry.names()), st.sampled_from(RuleRegistry.names())
dtypes = st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64])
shapes = st.lists(st.integers(0, 5), max_size=2).flatmap(lambda rows: st.integers(0, 40).map(lambda n: (*rows, n)))
tensors = shapes.flatmap(lambda shape: arrays.arrays(np.float32, shape, elements=st.floats(width=32)))
DRAWS = 20_000


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def identical(found: Tensor, expected: Tensor) -> bool:
    """Compare bit for bit, but for the payload of NaN."""
    return torch.equal(found.nan_to_num(nan=0.0), expected.nan_to_num(nan=0.0)) and torch.equal(
        found.isnan(), expected.isnan()
    )


@pytest.mark.longer
@given(values=tensors, name=formats, rule=rules, dtype=dtypes, q_scalar=st.sampled_from([1.0, 0.3, 2.0]))
def test_casts_and_counts_match_brute_force(values, name, rule, dtype, q_scalar):
    """Any tensor, format, rule, dtype and scale factor gives the values and counts of the slow reference."""
    given_, cast = torch.from_numpy(values).to(dtype), Cast(name, rule, q_scalar=q_scalar)
    scales = scales_of(cast, given_)
    rounded, counts = cast.with_counts(given_)
    assert identical(rounded, cast_by_hand(cast, given_, scales))
    expected = counts_by_hand(cast, given_, rounded, scales)
    assert {key: value.item() for key, value in counts.by_name().items()} == pytest.approx(expected, rel=1e-9)


@pytest.mark.longer
@given(values=tensors, name=formats, block=st.integers(1, 50))
def test_any_block_size_matches_brute_force(values, name, block):
    given_, cast = torch.from_numpy(values), Cast(name, "block", block=block)
    assert identical(cast(given_), cast_by_hand(cast, given_, scales_of(cast, given_)))


@given(name=formats, rule=st.sampled_from(["mx_floor", "mx_ceil", "mx_rceil", "mx_even"]), power=st.integers(-60, 60))
def test_microscaling_commutes_with_powers_of_two(name, rule, power):
    values = torch.randn(3, 50, generator=generator(1))
    assert torch.equal(Cast(name, rule)(values * 2.0**power), Cast(name, rule)(values) * 2.0**power)


PUBLISHED = ("metis_tensor", "metis_block")


@pytest.mark.some_rows(3)
@pytest.mark.guarantee("numbers-match-plain-formulas")
@pytest.mark.parametrize("rule", [rule for rule in RuleRegistry.names() if rule not in PUBLISHED])
@pytest.mark.parametrize("name", FormatRegistry.names())
def test_unpublished_rules_are_scale_invariant(name, rule):
    """Scaling the tensor by a power of two scales the result and keeps the number of underflows."""
    gradients, cast = torch.randn(6, 96, generator=generator(5)), Cast(name, rule)
    ordinary = cast.with_counts(gradients)[1].by_name()
    for power in (-80, -24, -23, 20):
        rounded, counts = cast.with_counts(gradients * 2.0**power)
        assert torch.equal(rounded, cast(gradients) * 2.0**power)
        assert counts.by_name()["underflow_elements"] == ordinary["underflow_elements"]


@pytest.mark.parametrize(("rule", "size", "share"), [("metis_tensor", 1e-7, 0.99), ("metis_block", 1e-10, 0.9)])
def test_the_published_rules_let_small_gradients_underflow(rule, size, share):
    gradients = torch.randn(64, 960, generator=generator(5)) * size
    assert Cast("e2m1", rule).with_counts(gradients)[1].by_name()["underflow_elements"] > share * gradients.numel()


@pytest.mark.some_rows(3)
@pytest.mark.parametrize("rule", RuleRegistry.names())
@pytest.mark.parametrize("name", FormatRegistry.names())
def test_cast_error_is_at_most_half_spacing(name, rule):
    """The bound holds for all values within the range of the format."""
    values = torch.randn(8, 96, generator=generator(2))
    cast = Cast(name, rule)
    scales = cast.scales(values)
    spread = scales if not scales.ndim else scales.repeat_interleave(min(cast.blocks(), 96), -1)
    inside = values.abs() <= spread * cast.number_format.maximum
    relative = values.abs() * 2.0 ** -(cast.number_format.mantissa_bits + 1)
    smallest = spread * cast.number_format.smallest_normal() * 2.0 ** -(cast.number_format.mantissa_bits + 1)
    error = (cast(values) - values).abs()
    assert (error <= torch.maximum(relative, smallest) * (1 + 1e-6))[inside].all()


def test_custom_block_size_is_used():
    """The last block of a row may be shorter."""
    values = torch.tensor([[6.0, 0.1, 60.0, 1.0, 0.5]])
    found = Cast("e2m1", "block", block=2)(values)
    torch.testing.assert_close(found, torch.tensor([[6.0, 0.0, 60.0, 0.0, 0.5]]), rtol=1e-5, atol=0)
    assert Cast("e2m1", "block", block=2).scales(values).shape == (1, 3)


def test_non_finite_values_leave_neighbors_unchanged():
    """NaN stays NaN and infinity becomes finite, and other values are cast as if both were zero."""
    values = torch.randn(2, 32, generator=generator(3))
    spoilt = values.clone()
    spoilt[0, 3], spoilt[1, 5] = torch.nan, torch.inf
    for rule in RuleRegistry.names():
        cast, kept = Cast("e4m3", rule), spoilt == values
        clean = torch.where(kept, values, 0.0)
        assert torch.equal(cast(spoilt)[kept], cast(clean)[kept])
        assert cast(spoilt)[0, 3].isnan()
        assert 0 < cast(spoilt)[1, 5] < torch.inf


@pytest.mark.parametrize("rounding", ["nearest", "stochastic", "soft"])
def test_zero_block_stays_zero_despite_infinities(rounding):
    """A tensor of zeros, infinities and NaN gives zeros and NaN, and the signs are kept."""
    values = torch.tensor([0.0, -0.0, torch.nan, torch.inf, -torch.inf])
    for rule in ("current", "nvfp4"):
        found = Cast("e2m1", rule, rounding)(values, generator=generator())
        assert found.isnan().tolist() == [False, False, True, False, False]
        assert found.nan_to_num(nan=0.0).tolist() == [0.0] * 5
        assert found.signbit()[[0, 1, 3, 4]].tolist() == [False, True, False, True]


def test_finite_float64_magnitudes_beyond_float32_saturate_and_overflow():
    values = torch.tensor([1e300, -1e300, 3e38, 1.0], dtype=torch.float64)
    found, counts = Cast("e2m1", "current").with_counts(values)
    assert found[0] == -found[1]
    assert found.isfinite().all()
    assert counts.by_name()["total_overflow_elements"] == 2


def test_overflowing_scale_saturates():
    """A scale factor that would exceed float32 gives the largest float32 as scale."""
    cast = Cast("e2m1", "current", q_scalar=1e30)
    values = torch.tensor([3e38, 1.0])
    assert cast.scales(values).item() == torch.finfo(torch.float32).max
    assert cast(values).tolist() == [torch.finfo(torch.float32).max, 0.0]


def stochastic_draws(value: float, name: str) -> Tensor:
    """Round one value, with scale 1, many times."""
    cast, maximum = Cast(name, "delayed", "stochastic"), FormatRegistry.get(name).maximum
    return cast(torch.full((DRAWS,), value), generator=generator(4), earlier=torch.tensor(maximum))


@pytest.mark.parametrize("name", FormatRegistry.names())
@pytest.mark.parametrize("share", [0.01, 0.3, 0.5, 0.77, 0.999])
def test_stochastic_rounding_is_unbiased(name, share):
    """Draws take only the two neighbors of the value, and their mean is the value."""
    grid = decoded(FormatRegistry.get(name))
    for low, high in [(grid[0], grid[1]), (grid[1], grid[2]), (grid[-3], grid[-2]), (grid[-2], grid[-1])]:
        value = torch.tensor(low + share * (high - low)).item()
        for sign in (1, -1):
            found = stochastic_draws(sign * value, name).double() * sign
            assert set(found.unique().tolist()) == {low, high}
            up = (value - low) / (high - low)
            error = (high - low) * math.sqrt(up * (1 - up) / DRAWS)
            assert abs(found.mean().item() - value) < 4 * error


@pytest.mark.some_rows(3)
@pytest.mark.parametrize("name", FormatRegistry.names())
@pytest.mark.parametrize("rule", RuleRegistry.names())
def test_mean_of_stochastic_casts_is_the_tensor(name, rule):
    """This holds for every format and rule, within the limits of the format."""
    number, cast, draw = 2000, Cast(name, rule, "stochastic"), generator(6)
    values = torch.randn(2, 64, generator=generator(5))
    scales = cast.scales(values)
    draws = torch.cat([cast(values.expand(500, 2, 64), generator=draw) for _ in range(number // 500)]).double()
    limits = (
        cast.limits(scales) if not scales.ndim else cast.limits(scales).repeat_interleave(min(cast.blocks(), 64), -1)
    )
    expected = values.double().clamp(-limits, limits)
    low, high = draws.amin(0), draws.amax(0)
    error = ((expected - low) * (high - expected)).clamp_min(0).div(number).sqrt()
    assert ((draws == low) | (draws == high)).all()
    assert ((draws.mean(0) - expected).abs() <= 4.5 * error + 2e-3 * limits).all()


def test_stochastic_rounding_compares_draw_with_fraction():
    """The magnitude rounds up exactly if the draw is below its fraction."""
    draws = torch.tensor([0.0, 0.25, 0.25 - 2**-24, 0.25, 0.25 - 2**-24, 0.0])
    values = torch.tensor([2.0, 2.25, 2.25, -2.25, -2.25, -0.0])
    found = by_draws(draws)(values)
    assert found.tolist() == [2.0, 2.0, 3.0, -2.0, -3.0, 0.0]
    assert found.signbit().tolist() == values.signbit().tolist()


def test_stochastic_rounding_keeps_grid_values():
    """Values of the format are unchanged, larger values saturate, and NaN stays NaN."""
    grid = FormatRegistry.get("e2m1").magnitudes().float()
    cast, with_scale_1 = Cast("e2m1", "delayed", "stochastic"), torch.tensor(6.0)
    for values in (grid, -grid):
        assert torch.equal(cast(values, generator=generator(), earlier=with_scale_1), values)
    beyond = torch.tensor([6.1, 100.0, torch.inf, torch.nan])
    beyond = cast(beyond, generator=generator(), earlier=with_scale_1)
    assert beyond[:3].tolist() == [6.0] * 3
    assert beyond[3].isnan()


def test_stochastic_rounding_draws_only_from_given_generator():
    values, cast = torch.randn(100), Cast("e2m1", "mx_floor", "stochastic")
    streams = [torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()]
    own = generator(7)
    first, second = cast(values, generator=own), cast(values, generator=own)
    assert torch.equal(streams[0], torch.get_rng_state())
    assert streams[1] == random.getstate()
    assert np.array_equal(streams[2], np.random.get_state()[1])
    assert not torch.equal(first, second)
    assert torch.equal(first, cast(values, generator=generator(7)))


def test_stochastic_rounding_without_a_generator_is_refused():
    with pytest.raises(UsageError, match="needs a separate generator"):
        Cast("e2m1", "current", "stochastic")(torch.ones(3))


def published(values: Tensor, scale: Tensor) -> Tensor:
    """Quantise and dequantise to e2m1 as the Metis code does, in float64 from the quotient on."""
    halves = (values.abs() / scale).double() * 2
    halves = halves - (halves - 4).relu() / 2 - (halves - 8).relu() / 4
    halves = halves.round()
    halves = halves + (halves - 4).relu() + (halves - 6).relu() * 2
    return halves * values.sign() / 2 * scale


@pytest.mark.parametrize("q_scalar", [1.0, 0.5, 0.1])
def test_soft_rounding_matches_published_arithmetic(q_scalar):
    values = torch.randn(64, 100, generator=generator(8))
    cast = Cast("e2m1", "tensor", "soft", q_scalar=q_scalar)
    assert torch.equal(cast(values), published(values, cast.scales(values)).float())
    blocks = values.reshape(640, 10)
    per_row = Cast("e2m1", "block", "soft", block=10, q_scalar=q_scalar)
    assert torch.equal(per_row(blocks), published(blocks, per_row.scales(blocks)).float())


def test_soft_rounding_passes_overflows():
    """Soft rounding keeps a value beyond the range, but still counts the overflow."""
    cast = Cast("e2m1", "current", "soft", q_scalar=0.5)
    found, counts = cast.with_counts(torch.tensor([6.0, 1.5]))
    assert found.tolist() == [6.0, 1.5]
    assert counts.by_name()["total_overflow_elements"] == 1
    assert Cast("e2m1", "current", q_scalar=0.5)(torch.tensor([6.0, 1.5])).tolist() == [3.0, 1.5]


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.complex64])
def test_tensors_of_other_types_are_refused(dtype):
    cast = Cast("e2m1", "block")
    for call in (cast, cast.with_counts, cast.scales):
        with pytest.raises(UsageError, match=rf"A tensor of {dtype} cannot be cast .*; convert it to float32 first\."):
            call(torch.ones(3).to(dtype))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"format": "e2m2"}, r"Unknown format 'e2m2'\. Did you mean 'e"),
        ({"rule": "blocks"}, r"Unknown scaling rule 'blocks'\. Did you mean 'block'"),
        ({"rounding": "stochastically"}, r"Unknown rounding 'stochastically'\. Did you mean 'stochastic'"),
        ({"block": 0}, "block of 0 does not suit scaling rule 'block'; it takes one value or more"),
        ({"rule": "nvfp4", "block": 32}, "'nvfp4'; it takes blocks of 16 and no other size"),
        ({"rule": "mx_floor", "block": 16}, "'mx_floor'; it takes blocks of 32 and no other size"),
        ({"rule": "current", "block": 16}, "'current'; it takes whole tensors and no other size"),
        *[({"q_scalar": value}, "must be positive and finite") for value in (0.0, -1.0, math.inf, math.nan)],
    ],
)
def test_invalid_cast_options_are_refused(options, words):
    """Unknown names, unsuitable blocks and invalid scale factors raise a UsageError."""
    with pytest.raises(UsageError, match=words):
        Cast(**{"format": "e2m1", "rule": "block", **options})
