"""Scaling rules: the scales of every rule in exact arithmetic, and the checks of rule classes."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from loopscope.errors import UsageError
from loopscope.lowbit.casts import Cast, FormatRegistry, RuleRegistry
from loopscope.lowbit.casts.scaling import ScalingRule, check_rule
from torch import Tensor

from tests.framework.lowbit.casts.brute_force import decoded, nearest

LARGEST = torch.finfo(torch.float32).max
magnitudes = st.floats(0, LARGEST, width=32)
formats = st.sampled_from(FormatRegistry.names())
every_format = pytest.mark.parametrize("name", FormatRegistry.names())
MICROSCALING = ["mx_floor", "mx_ceil", "mx_rceil", "mx_even"]
MANTISSA_BITS = {"e2m1": 1, "e2m3": 3, "e3m2": 2, "e4m3": 3, "e5m2": 2, "int8": 6}
TOP_EXPONENT = {"e2m1": 2, "e2m3": 2, "e3m2": 4, "e4m3": 8, "e5m2": 15, "int8": 6}
MAXIMUM = {"e2m1": 6, "e2m3": 7.5, "e3m2": 28, "e4m3": 448, "e5m2": 57344, "int8": 127}


def scale(rule: str, name: str, largest: float) -> float:
    """Return the scale of a tensor, or a single block, with this largest magnitude."""
    return RuleRegistry.get(rule)().scales(torch.tensor(largest), FormatRegistry.get(name)).item()


def as_float32(exact: Fraction) -> float:
    """Round to nearest."""
    return torch.tensor(float(exact), dtype=torch.float64).float().item()


def log2(value: float) -> int:
    """Return floor(log2 value), exactly."""
    return math.frexp(value)[1] - 1


def smallest_covering_exponent(largest: float, maximum: float) -> int:
    """Return the smallest k with maximum · 2^k at least the largest magnitude, by trying, exactly."""
    exponent = log2(largest) - log2(maximum) - 2
    while Fraction(maximum) * Fraction(2) ** exponent < Fraction(largest):
        exponent += 1
    return exponent


def shared_exponent(rule: str, name: str, largest: float) -> int:
    """Return the exponent of the block's scale by the published definitions, before clamping."""
    if rule == "mx_floor":
        return log2(largest) - TOP_EXPONENT[name]
    if rule == "mx_ceil":
        return log2(largest) + (math.frexp(largest)[0] != 0.5) - TOP_EXPONENT[name]
    if rule == "mx_rceil":
        return smallest_covering_exponent(largest, MAXIMUM[name])
    steps = Fraction(largest) / Fraction(2) ** (log2(largest) - MANTISSA_BITS[name])
    rounded = math.floor(steps + Fraction(1, 2))
    return log2(largest) + (rounded == 2 ** (MANTISSA_BITS[name] + 1)) - TOP_EXPONENT[name]


@given(
    name=formats,
    largest=magnitudes,
    rule=st.sampled_from(["current", "tensor", "block", "row", "metis_tensor", "metis_block", "delayed"]),
)
def test_real_scales_cover_largest_magnitude(name, largest, rule):
    """The scale is the magnitude over the format's maximum plus epsilon, within float32 rounding."""
    epsilon = {"metis_tensor": 1e-6, "metis_block": 1e-9}.get(rule, 0.0)
    found, exact = scale(rule, name, largest), Fraction(largest) / Fraction(MAXIMUM[name]) + Fraction(epsilon)
    assert Fraction(found) * Fraction(MAXIMUM[name]) >= Fraction(largest)
    assert abs(Fraction(found) - exact) <= exact * Fraction(2) ** -22 + Fraction(2) ** -149


@given(name=formats, largest=magnitudes.filter(lambda value: value > 0), rule=st.sampled_from(MICROSCALING))
def test_microscaling_exponents_match_exact_arithmetic(name, largest, rule):
    exponent = min(max(shared_exponent(rule, name, largest), -127), 127)
    assert scale(rule, name, largest) == 2.0**exponent


@every_format
@pytest.mark.parametrize("rule", MICROSCALING)
def test_microscaling_exponents_change_at_the_right_magnitude(name, rule):
    turns = torch.tensor([1.0, 1.25, 1.5, 1.75, 1.875, 1.9375, 2.0]) * 8
    turns = torch.cat([turns, *(torch.nextafter(turns, torch.tensor(end)) for end in (-torch.inf, torch.inf))])
    for largest in turns.tolist():
        assert scale(rule, name, largest) == 2.0 ** shared_exponent(rule, name, largest)


@every_format
@pytest.mark.parametrize("rule", MICROSCALING)
@pytest.mark.parametrize("largest", [0.0, 2.0**-149, 2.0**-126 - 2.0**-149, 2.0**-126])
def test_smallest_shared_scale_is_e8m0_minimum(name, rule, largest):
    """Zero and the smallest magnitudes give 2**-127 in every microscaling rule."""
    assert scale(rule, name, largest) == 2.0**-127


@every_format
@pytest.mark.parametrize("rule", ["mx_ceil", "mx_rceil"])
def test_covering_rules_cover_largest_float32(name, rule):
    """Scale times format maximum reaches the largest float32 number for mx_ceil and mx_rceil."""
    assert scale(rule, name, LARGEST) * MAXIMUM[name] >= LARGEST


def nvfp4_by_hand(largest: list[float], name: str) -> list[float]:
    """Return the scales in exact arithmetic, with only the roundings of the definition."""
    of_tensor = max(as_float32(Fraction(max(largest)) / Fraction(MAXIMUM[name] * 448)), 2.0**-126)
    ratios = [
        as_float32(Fraction(as_float32(Fraction(x) / Fraction(MAXIMUM[name]))) / Fraction(of_tensor)) for x in largest
    ]
    e4m3 = decoded(FormatRegistry.get("e4m3"))
    return [as_float32(Fraction(nearest(ratio, e4m3)) * Fraction(of_tensor)) for ratio in ratios]


@given(name=formats, largest=st.lists(st.floats(2.0**-100, 2.0**100, width=32), min_size=1, max_size=20))
def test_nvfp4_scales_match_hand_computation(name, largest):
    """Each scale is an E4M3 number times the scale of the tensor."""
    found = RuleRegistry.get("nvfp4")().scales(torch.tensor(largest), FormatRegistry.get(name))
    assert found.tolist() == nvfp4_by_hand(largest, name)


@every_format
@pytest.mark.parametrize("size", [0.0, 2.0**-149, 2.0**-130, 2.0**-120, LARGEST])
def test_nvfp4_scales_hold_at_float32_extremes(name, size):
    """The scales match the hand computation and are finite for the smallest and largest magnitudes."""
    largest = torch.tensor([size, size / 2, size / 3, 0.0])
    found = RuleRegistry.get("nvfp4")().scales(largest, FormatRegistry.get(name))
    assert found.tolist() == nvfp4_by_hand(largest.tolist(), name)
    assert found.isfinite().all()


def test_nvfp4_underflows_far_below_largest_block():
    """A block whose magnitude is 458,752 times below the largest gets a scale of zero."""
    bound = 6.0 * 448 / 6 * 2**10
    found = RuleRegistry.get("nvfp4")().scales(torch.tensor([bound, 1.0, 1.01]), FormatRegistry.get("e2m1"))
    assert (found > 0).tolist() == [True, False, True]


@pytest.mark.parametrize("rule", RuleRegistry.names())
@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 2)])
def test_no_blocks_have_no_scales(rule, shape):
    assert RuleRegistry.get(rule)().scales(torch.zeros(shape), FormatRegistry.get("e2m1")).shape == shape


def history(*largest: float) -> Tensor:
    return torch.tensor([*largest, *[0.0] * (16 - len(largest))])


def test_delayed_scale_follows_largest_past_magnitude():
    """Without a history, the scale follows the current tensor."""
    values = torch.tensor([1.0, -3.0])
    cast = Cast("e4m3", "delayed")
    assert cast.scales(values, history(7.0, 14.0, 3.5)).item() == pytest.approx(14 / 448, rel=1e-6)
    assert cast.scales(values, history()).item() == pytest.approx(3 / 448, rel=1e-6)
    assert cast.scales(values).item() == pytest.approx(3 / 448, rel=1e-6)


def test_rule_without_history_ignores_past_magnitudes():
    values = torch.tensor([1.0, -3.0])
    assert Cast("e4m3", "current").scales(values, history(100.0)) == Cast("e4m3", "current").scales(values)


def make(**attributes) -> type[ScalingRule]:
    return type("Made", (ScalingRule,), {"name": "made", **attributes})


@pytest.mark.parametrize(
    ("attributes", "words"),
    [
        ({"name": ""}, "needs a name"),
        ({"block": 0}, "blocks of 0 elements; there must be one or more"),
        ({"block": 8, "history": 2, "overflows": True}, "blocks and a history"),
        ({"any_block": True, "history": 2, "overflows": True}, "blocks and a history"),
        ({"history": 2}, "set overflows = True"),
    ],
)
def test_invalid_rule_class_is_refused(attributes, words):
    with pytest.raises(UsageError, match=words):
        check_rule(make(**attributes))


def test_unknown_rule_suggests_nearest_name():
    with pytest.raises(UsageError, match=r"Unknown scaling rule 'mx_flor'\. Did you mean 'mx_floor'"):
        RuleRegistry.get("mx_flor")
