"""The arithmetic of casts on tensors laid out in blocks: what the compiler fuses, and what runs uncompiled as it is."""

from dataclasses import dataclass

import torch
from torch import Tensor

from framework.lowbit.formats import FloatFormat, Round, by_draws, clamped_to, to_continued_grid, to_grid
from framework.lowbit.scaling import ScalingRule

FLOAT32_MAX = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class Scaling:
    """How scales follow from magnitudes: classes in the place of names."""

    rule: type[ScalingRule]
    number_format: type[FloatFormat]
    q_scalar: float


@dataclass(frozen=True)
class Grid:
    """To what numbers, and how, scaled values are rounded."""

    number_format: type[FloatFormat]
    rounding: str


def largest_in(blocks: Tensor) -> Tensor:
    """Return the largest finite magnitude of each row of ``blocks`` (n, b), or of all of (n); 0 where is none."""
    magnitude = blocks.abs()
    finite = torch.where(magnitude < torch.inf, magnitude, 0.0)
    return finite.amax(-1) if finite.numel() else finite.new_zeros(finite.shape[:-1])


def scales_for(largest: Tensor, scaling: Scaling) -> Tensor:
    """Return the float32 scales for largest magnitudes of any shape."""
    scales = scaling.rule().scales(as_float32(largest), scaling.number_format)
    if scaling.q_scalar != 1:
        scales = scales * scaling.q_scalar
    return scales.clamp_max(FLOAT32_MAX)


def scales_of(blocks: Tensor, scaling: Scaling) -> Tensor:
    """Return the scales (n) of blocks (n, b)."""
    return scales_for(largest_in(blocks), scaling)


def cast(blocks: Tensor, scales: Tensor, draws: Tensor | None, grid: Grid) -> Tensor:
    """Return blocks (n, b) after the cast with scales (n), or values (n) after that with one scale.

    ``draws``, of the shape of ``blocks``, decide which way stochastic rounding goes.
    """
    spread = scales.unsqueeze(-1) if blocks.ndim > 1 else scales
    scaled = computable(blocks) / torch.where(spread > 0, spread, 1.0)
    return saturated(_rounded(scaled, draws, grid) * spread, blocks.dtype).to(blocks.dtype)


def _rounded(scaled: Tensor, draws: Tensor | None, grid: Grid) -> Tensor:
    if grid.rounding == "soft":
        return to_continued_grid(saturated(scaled, scaled.dtype), grid.number_format)
    round_: Round = torch.round if draws is None else by_draws(draws)
    return to_grid(scaled, grid.number_format, round_)


def computable(values: Tensor) -> Tensor:
    """Return the tensor in the type in which casts compute: float32, or float64 if that is its own."""
    return values if values.dtype in (torch.float32, torch.float64) else values.float()


def saturated(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the values, clamped to the finite numbers of a type; NaN stays NaN."""
    return clamped_to(values, torch.finfo(dtype).max)


def as_float32(largest: Tensor) -> Tensor:
    """Round magnitudes up to float32, but to its largest number at most; narrower ones are exact."""
    if largest.dtype != torch.float64:
        return largest.float()
    narrow = largest.float()
    short = narrow.double() < largest
    covering = torch.where(short, torch.nextafter(narrow, torch.full_like(narrow, torch.inf)), narrow)
    return covering.clamp_max(FLOAT32_MAX)


def measured(blocks: Tensor, scaling: Scaling) -> tuple[Tensor, Tensor, Tensor]:
    """Return what counting needs: the scales (n) of blocks (n, b), their limits (n), and the unit of errors."""
    largest = largest_in(blocks)
    scales = scales_for(largest, scaling)
    return scales, limits_of(scales, scaling.number_format), unit_of(largest.amax())


def limits_of(scales: Tensor, number_format: type[FloatFormat]) -> Tensor:
    """Return the largest float32 magnitudes that do not overflow: scale · maximum rounded down; inf for scale 0.

    A float32 number exceeds scale · maximum if, and only if, it exceeds that.
    """
    exact = scales.double() * number_format.maximum
    near = exact.float()
    below = torch.where(near.double() > exact, torch.nextafter(near, torch.zeros_like(near)), near)
    return torch.where(scales > 0, below, torch.inf)


def unit_of(largest: Tensor) -> Tensor:
    """Return a power of two that brings the largest magnitude near 1, so that squares neither over- nor underflow."""
    exponent = (as_float32(largest).view(torch.int32) >> 23).clamp(27, 227)
    return ((254 - exponent) << 23).view(torch.float32)


def cast_and_count(
    blocks: Tensor, scales: Tensor, limits: Tensor, unit: Tensor, draws: Tensor | None, grid: Grid
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what :func:`cast` does, with the sums and maxima of :mod:`framework.lowbit.counts`; 0 for the total.

    Whole numbers are exact. Real ones are sums of float32 numbers, added up pairwise, good to six digits or more: sums
    in float64 would take more time than everything else. An excess beyond 2^128 is inf, and of errors below
    1e-15 of the largest magnitude the squares are lost.
    """
    rounded = cast(blocks, scales, draws, grid)
    limit = limits.unsqueeze(-1) if blocks.ndim > 1 else limits
    values = blocks.float()
    magnitude = values.abs()
    finite = (magnitude < torch.inf) & (limit > 0)  # always above 0, but so all is counted in one loop over blocks
    magnitude = torch.where(finite, magnitude, 0.0)
    over = magnitude > limit
    excess = torch.where(over, magnitude / limit * 2.0**-64, 0.0)
    error = torch.where(finite, (rounded.float() - values) * unit, 0.0)
    overflowing, squared = _how_many(over), unit.double() ** 2
    sums = (
        torch.ones_like(squared),
        (overflowing > 0).double(),
        torch.zeros_like(squared),
        overflowing,
        _how_many((rounded == 0) & (magnitude > 0)),
        _how_many(~finite),
        _how_many(magnitude + magnitude > limit),
        excess.sum().double() * 2.0**64,
        error.square().sum().double() / squared,
        (magnitude * unit).square().sum().double() / squared,
    )
    smallest = torch.where(scales > 0, scales, torch.inf).amin()
    return (
        rounded,
        torch.stack(sums),
        torch.stack([excess.amax().double() * 2.0**64, scales.amax().double(), 1 / smallest.double()]),
    )


def _how_many(flags: Tensor) -> Tensor:
    return flags.to(torch.int32).sum(dtype=torch.int32).double()
