"""Counts: losses of Gaussian tensors under the published rules, and sums of counts."""

import pytest
import torch
from loopscope.lowbit.casts import MAXIMA, SUMS, Cast, Counts
from torch import Tensor


def gaussian(rows: int, columns: int = 960) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))


def loss_counts(format_: str, rule: str, values: Tensor, **options: float) -> dict[str, float]:
    return {key: value.item() for key, value in Cast(format_, rule, **options).with_counts(values)[1].by_name().items()}


def test_mxfp4_floor_clips_two_percent_of_gaussian():
    """The largest excess is at most 8/6."""
    counts = loss_counts("e2m1", "mx_floor", gaussian(64))
    assert counts["total_overflow_elements"] / counts["total_elements"] == pytest.approx(0.023, abs=0.002)
    assert 1.3 < counts["excess_max"] <= 8 / 6


@pytest.mark.parametrize("rule", ["tensor", "block", "current", "mx_ceil", "mx_rceil"])
@pytest.mark.parametrize("name", ["e2m1", "e2m3", "e3m2", "e4m3", "e5m2"])
def test_full_range_rules_clip_nothing_of_gaussian(name, rule):
    """Rules that fit the scale to the largest value have no overflow in any format."""
    counts = loss_counts(name, rule, gaussian(64))
    assert counts["total_overflow_elements"] == counts["overflow_count"] == counts["excess_max"] == 0


def test_nvfp4_blocks_exceed_range_by_at_most_sixteenth():
    """Half of the Gaussian blocks exceed the range, because the scale is rounded to float8."""
    blocks = gaussian(4000, 16)
    cast = Cast("e2m1", "nvfp4")
    beyond = blocks.abs().amax(-1, keepdim=True).double() > cast.limits(cast.scales(blocks))
    counts = loss_counts("e2m1", "nvfp4", blocks)
    assert beyond.double().mean().item() == pytest.approx(0.5, abs=0.05)
    assert counts["total_overflow_elements"] >= beyond.sum()
    assert 1.05 < counts["excess_max"] <= 1 + 1 / 16


def test_published_overflow_rule_flags_third_of_gaussian():
    """About 32% of the elements count as in the upper half, though none overflows."""
    counts = loss_counts("e2m1", "block", gaussian(64))
    assert counts["upper_half_elements"] / counts["total_elements"] == pytest.approx(0.32, abs=0.02)
    assert counts["total_overflow_elements"] == 0


def test_even_and_rceil_beat_floor_and_ceil():
    """mx_even clips less than mx_floor, and mx_rceil has a smaller squared error than mx_ceil."""
    clipped = {
        rule: loss_counts("e2m1", rule, gaussian(64))["total_overflow_elements"] for rule in ("mx_floor", "mx_even")
    }
    assert 0 < clipped["mx_even"] < clipped["mx_floor"]
    errors = {rule: loss_counts("e2m1", rule, gaussian(64))["squared_error"] for rule in ("mx_ceil", "mx_rceil")}
    assert errors["mx_rceil"] < errors["mx_ceil"]


def test_overflow_starts_just_above_the_limit():
    """A value at the limit does not overflow; the next representable number does."""
    cast, scale = Cast("e2m1", "current"), torch.tensor(1.0)
    at = torch.tensor([6.0, -6.0])
    assert (at.double().abs() <= cast.limits(scale)).all()
    assert loss_counts("e2m1", "delayed", at)["total_overflow_elements"] == 0
    beyond = torch.nextafter(at, at * 2)
    earlier = cast.with_counts(torch.cat([beyond, at]))[1].by_name()["total_overflow_elements"]
    late = Cast("e2m1", "delayed").with_counts(beyond, earlier=torch.tensor([6.0]))[1].by_name()
    assert (earlier, late["total_overflow_elements"], late["overflow_count"]) == (0, 2, 1)


def test_zero_scale_blocks_count_as_underflow_only():
    """Their elements do not count as overflow."""
    values = torch.cat([torch.full((1, 16), 2688.0 * 1024), torch.full((1, 16), 1.0)], dim=-1)
    counts = loss_counts("e2m1", "nvfp4", values)
    assert counts["underflow_elements"] == counts["upper_half_elements"] == 16
    assert counts["total_overflow_elements"] == 0
    assert counts["squared_error"] == 16


def test_underflow_counts_nonzero_values_that_become_zero():
    counts = loss_counts("e2m1", "current", torch.tensor([6.0, 0.25, -0.25, 0.26, 0.0, -0.0, 1e-30]))
    assert counts["underflow_elements"] == 3


def test_nonfinite_elements_are_counted_separately():
    """They count before the cast and are left out of overflow, error and norm."""
    values = torch.tensor([6.0, torch.inf, -torch.inf, torch.nan])
    counts = loss_counts("e2m1", "current", values)
    assert (counts["non_finite_elements"], counts["total_elements"]) == (3, 4)
    assert counts["total_overflow_elements"] == counts["squared_error"] == 0
    assert (counts["squared_norm"], counts["upper_half_elements"], counts["scale_max"]) == (36, 1, 1)


def test_counts_add_up_and_keep_the_maximum():
    """Sums are added and maxima are kept over several quantizations."""
    parts = [Cast("e2m1", "mx_floor").with_counts(gaussian(8, 64) * size)[1] for size in (1.0, 3.0, 100.0)]
    total = Counts.zeros()
    for part in parts:
        total.add(part)
    assert torch.equal(total.sums, sum(part.sums for part in parts))
    assert torch.equal(total.maxima, torch.stack([part.maxima for part in parts]).amax(0))
    assert total.by_name()["quantizations"] == 3


def test_adding_nothing_changes_nothing():
    counts = Cast("e2m1", "mx_floor").with_counts(gaussian(2))[1]
    total = Counts.zeros()
    total.add(counts)
    total.add(Counts.zeros())
    assert torch.equal(total.sums, counts.sums)
    assert torch.equal(total.maxima, counts.maxima)


def test_counts_of_several_layers_use_leading_dimensions():
    """Sums and maxima are float64 tensors with the given leading shape."""
    found = Counts.zeros(3, 2)
    assert (found.sums.shape, found.maxima.shape) == ((3, 2, len(SUMS)), (3, 2, len(MAXIMA)))
    assert found.sums.dtype == found.maxima.dtype == torch.float64
    assert set(found.by_name()) == {*SUMS, *MAXIMA}
    assert found.by_name()["excess_max"].shape == (3, 2)


def test_the_smallest_scale_leaves_out_scales_of_zero():
    values = torch.tensor([[12.0] * 16 + [0.0] * 16 + [3.0] * 16])
    cast = Cast("e2m1", "nvfp4")
    counts, scales = loss_counts("e2m1", "nvfp4", values), cast.scales(values)
    assert scales[0, 1] == 0
    assert 1 / counts["inverse_scale_max"] == pytest.approx(scales[0, 2].item())
    assert counts["scale_max"] == scales[0, 0].item()
    assert loss_counts("e2m1", "nvfp4", torch.zeros(1, 16))["inverse_scale_max"] == 0


def test_sums_match_float64():
    values = gaussian(64) * 1e-4
    rounded, counts = Cast("e4m3", "current").with_counts(values)
    error = (rounded.double() - values.double()).square().sum().item()
    assert counts.by_name()["squared_error"].item() == pytest.approx(error, rel=1e-9)
    assert counts.by_name()["squared_norm"].item() == pytest.approx(values.double().square().sum().item(), rel=1e-9)
