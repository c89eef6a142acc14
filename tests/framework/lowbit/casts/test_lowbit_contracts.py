"""For every registered format and scaling rule: casts and counts against the definitions, number by number."""

import math
from itertools import product
from typing import get_args

import pytest
import torch
from loopscope.lowbit.casts import Cast, Counts, FloatFormat, FormatRegistry, RuleRegistry, zero_padded
from loopscope.lowbit.casts.casts import Rounding
from loopscope.lowbit.casts.scaling import Current, ScalingRule
from torch import Tensor

from tests.framework.lowbit.casts.brute_force import cast_by_hand, counts_by_hand, scales_of
from tests.support.cases import matrix

SHAPE = (2, 41)
EARLIER = torch.tensor([0.5, 1.25, 0.0])
FACTORS = {torch.float16: 1.0, torch.bfloat16: 1.5, torch.float64: 1.0, torch.float32: 0.25}
"""What the scale of each type is multiplied by."""


def drawn(seed: int) -> tuple[Tensor, torch.Generator]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(SHAPE, generator=generator), generator


def heavy_tailed() -> Tensor:
    """Draw Cauchy numbers, as quotients of Gaussian ones."""
    above, generator = drawn(2)
    return above / torch.randn(SHAPE, generator=generator)


def single_outlier() -> Tensor:
    values = drawn(3)[0] * 1e-3
    values[1, 20] = -1e5
    return values


def non_finite() -> Tensor:
    """Scatter inf and NaN, and fill most of one row with nothing else."""
    values = drawn(4)[0]
    values[0, ::7], values[0, 3::9], values[0, 5] = torch.inf, torch.nan, -torch.inf
    values[1, :20], values[1, 20:38] = torch.nan, -torch.inf
    return values


INPUTS = {
    "gaussian": drawn(1)[0],
    "heavy-tailed": heavy_tailed(),
    "constant": torch.full(SHAPE, -0.7),
    "all-zero": torch.zeros(SHAPE) * torch.tensor([[1.0], [-1.0]]),
    "single-outlier": single_outlier(),
    "non-finite": non_finite(),
}
every_input = pytest.mark.parametrize("values", INPUTS.values(), ids=INPUTS)
every_cast = pytest.mark.parametrize(
    "cast",
    [Cast(*names) for names in product(FormatRegistry.names(), RuleRegistry.names())],
    ids=lambda cast: f"{cast.format}-{cast.rule}",
)


def beyond_float32(values: Tensor) -> bool:
    return values.double()[values.isfinite()].abs().gt(torch.finfo(torch.float32).max).any().item()


def check_cast(cast: Cast, values: Tensor, earlier: Tensor | None = None) -> Counts:
    """Check the scales, the numbers bit for bit, and every count; return the counts."""
    scales = scales_of(cast, values, earlier)
    assert cast.scales(values, earlier).reshape(-1).tolist() == scales
    rounded, counts = cast.with_counts(values, earlier=earlier)
    expected = cast_by_hand(cast, values, scales)
    torch.testing.assert_close(rounded, expected, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(rounded.signbit() | rounded.isnan(), expected.signbit() | expected.isnan())
    torch.testing.assert_close(cast(values, earlier=earlier), rounded, rtol=0, atol=0, equal_nan=True)
    check_counts(counts, counts_by_hand(cast, values, rounded, scales))
    if not (cast.scaling_rule.overflows or cast.q_scalar * 2.0**cast.margin < 1 or beyond_float32(values)):
        assert counts.by_name()["total_overflow_elements"] == 0
    return counts


def check_counts(counts: Counts, expected: dict[str, float]) -> None:
    """Compare: whole numbers exactly, sums of real ones as close as the order of adding allows."""
    found = {name: value.item() for name, value in counts.by_name().items()}
    real = {"excess_sum", "squared_error", "squared_norm", "excess_max", "inverse_scale_max"}
    for name, value in found.items():
        assert value == (pytest.approx(expected[name], rel=1e-12, nan_ok=True) if name in real else expected[name]), (
            name
        )


@pytest.mark.guarantee("numbers-match-plain-formulas")
@every_cast
@every_input
def test_numbers_and_counts_match_brute_force(cast, values):
    """Rounded values and counts of every format and rule equal those of a plain loop in float64."""
    check_cast(cast, values)


@matrix("name, rule, dtype", FormatRegistry.names(), RuleRegistry.names(), FACTORS)
def test_dtypes_and_factors_match_brute_force(name, rule, dtype):
    """Casts and counts of every format and rule match for each dtype with its scale factor."""
    for values in INPUTS.values():
        check_cast(Cast(name, rule, q_scalar=FACTORS[dtype]), values.to(dtype))


@matrix("name, rule, dtype", FormatRegistry.names(), RuleRegistry.names(), FACTORS)
def test_dtype_extremes_match_brute_force(name, rule, dtype):
    """The largest and smallest values of each dtype give finite results that match the reference."""
    cast, found = Cast(name, rule), torch.finfo(dtype)
    ends = torch.tensor([found.max, -found.max, found.max / 3, found.smallest_normal, -found.tiny / 2, 0], dtype=dtype)
    smallest = torch.full((20,), found.smallest_normal * found.eps, dtype=dtype)
    for values in (ends, smallest, smallest * 5, torch.cat([smallest * 3, torch.zeros_like(smallest)])):
        assert check_cast(cast, values).by_name()["excess_max"] < math.inf
        assert cast(values).isfinite().all()


@pytest.mark.parametrize("rule", [rule.name for rule in RuleRegistry if rule.history])
@pytest.mark.parametrize("name", FormatRegistry.names())
def test_rules_with_history_match_brute_force(rule, name):
    """Scales from earlier magnitudes give the expected values, counts and overflows."""
    for label, values in INPUTS.items():
        counts = check_cast(Cast(name, rule), values, EARLIER).by_name()
        assert (counts["overflow_count"] == 1) == (label not in ("constant", "all-zero"))


@every_cast
def test_every_shape_matches_brute_force(cast):
    """Scalars, empty tensors and tensors of three dimensions are included."""
    for shape in [(), (0,), (3, 0), (0, 3), (1,), (2, 2, 17)]:
        values = torch.randn(shape, generator=torch.Generator().manual_seed(6))
        assert check_cast(cast, values).by_name()["total_elements"] == values.numel()


@every_cast
def test_layout_in_memory_changes_nothing(cast):
    wide = torch.randn(40, 2, 37, generator=torch.Generator().manual_seed(7))
    layouts = [wide.transpose(0, 2), wide[:, 0, ::2], wide[:, :1].expand(40, 3, 37), wide.permute(2, 0, 1)[1:]]
    for values, rounding in product(layouts, get_args(Rounding)):
        same = Cast(cast.format, cast.rule, rounding)
        found, dense = (same(x, generator=torch.Generator().manual_seed(8)) for x in (values, values.contiguous()))
        assert torch.equal(found, dense)


@every_cast
def test_casting_commutes_with_negation(cast):
    for values in INPUTS.values():
        torch.testing.assert_close(cast(-values), -cast(values), rtol=0, atol=0, equal_nan=True)


@every_cast
def test_cast_leaves_its_input_unchanged(cast):
    """The result is a new tensor for every rounding."""
    for rounding in get_args(Rounding):
        values = INPUTS["gaussian"].clone()
        found = Cast(cast.format, cast.rule, rounding)(values, generator=torch.Generator())
        assert torch.equal(values, INPUTS["gaussian"])
        assert found.data_ptr() != values.data_ptr()


class E3M0(FloatFormat):
    """Powers of two only, as in logarithmic FP4."""

    name = "e3m0"
    exponent_bits, mantissa_bits, maximum = 3, 0, 16.0


class HalfRange(ScalingRule):
    """Blocks of 8 that use the lower half of the format's range."""

    name = "half_range"
    block = 8

    def scales(self, largest: Tensor, number_format: type[FloatFormat]) -> Tensor:
        return 4 * largest / number_format.maximum


class TwoBack(Current):
    """Scales by the larger of two earlier tensors."""

    name = "two_back"
    history = 2
    overflows = True


class Boaster(HalfRange):
    """Says that nothing overflows, though everything above a quarter of the largest magnitude does."""

    name = "boaster"

    def scales(self, largest: Tensor, number_format: type[FloatFormat]) -> Tensor:
        return largest / number_format.maximum / 4


@pytest.fixture
def newly_registered():
    FormatRegistry.register(E3M0)
    for rule in (HalfRange, TwoBack, Boaster):
        RuleRegistry.register(rule)
    yield
    FormatRegistry.unregister("e3m0")
    for name in ("half_range", "two_back", "boaster"):
        RuleRegistry.unregister(name)


@pytest.mark.usefixtures("newly_registered")
@pytest.mark.parametrize("names", [("e3m0", "half_range"), ("e3m0", "mx_rceil"), ("e2m1", "half_range")])
def test_new_formats_and_rules_pass_the_checks(names):
    """Newly registered formats and rules match the slow reference without further code."""
    for values in INPUTS.values():
        check_cast(Cast(*names), values)


@pytest.mark.usefixtures("newly_registered")
def test_new_history_rule_uses_earlier_magnitudes():
    cast = Cast("e3m0", "two_back")
    for values in INPUTS.values():
        check_cast(cast, values, EARLIER)
    assert cast.scales(INPUTS["gaussian"], EARLIER).item() == 1.25 / 16


@pytest.mark.usefixtures("newly_registered")
def test_rule_with_false_overflow_claim_fails():
    """The check fails for a rule that wrongly declares that no value overflows."""
    with pytest.raises(AssertionError):
        check_cast(Cast("e2m1", "boaster"), INPUTS["gaussian"])


@pytest.mark.usefixtures("newly_registered")
def test_contracts_include_new_formats_and_rules():
    """The registries list newly registered formats and rules, so the contract tests cover them."""
    assert "e3m0" in FormatRegistry.names()
    assert {"half_range", "two_back", "boaster"} <= set(RuleRegistry.names())


@pytest.mark.parametrize("shape", [(2, 3, 5), (1, 0, 3), (2, 3, 0), (0, 4)])
def test_padding_adds_zeros_to_empty_matrices_too(shape):
    values = torch.ones(shape, requires_grad=True)
    found = zero_padded(values, 2, 1)
    *outer, height, length = shape
    assert found.shape == (*outer, height + 1, length + 2)
    assert found[..., :height, :length].equal(values)
    assert found.sum() == values.sum()
    found.sum().backward()
    assert values.grad.equal(torch.ones(shape))
