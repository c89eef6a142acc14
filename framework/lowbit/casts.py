"""Quantise and dequantise: a tensor as it would be after a trip through a narrow format, and what the trip cost."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from framework.errors import UsageError, unknown
from framework.lowbit.counts import Counts, count
from framework.lowbit.formats import FloatFormat, FormatRegistry, stochastic, to_continued_grid, to_grid
from framework.lowbit.scaling import RuleRegistry, ScalingRule

Rounding = Literal["nearest", "stochastic", "soft"]
ROUNDINGS: tuple[Rounding, ...] = ("nearest", "stochastic", "soft")


@dataclass(frozen=True)
class Cast:
    """A format, a scaling rule and a rounding: x becomes scale · q(x / scale).

    The quotient and the product are float32 (float64 for float64 tensors); the result is rounded to the tensor's own
    type, and saturates at that type's largest number. Scales are float32 whatever the tensor: a float64 magnitude
    beyond float32's range does not raise the scale further, so that it overflows under any rule. inf saturates, and
    NaN stays NaN; neither counts towards the largest magnitude.

    Args:
        format: the name of a registered format.
        rule: the name of a registered scaling rule.
        rounding: ``nearest`` (ties to even), ``stochastic``, or ``soft``: to nearest, but on the grid continued beyond
            the format's largest number instead of saturating, as the published Metis code does.
        block: values of a row that share a scale, for the rules that leave it open; by default the rule's own.
        q_scalar: factor on the scale; below 1, values leave the range.
    """

    format: str
    rule: str
    rounding: Rounding = "nearest"
    block: int | None = None
    q_scalar: float = 1.0

    def __post_init__(self) -> None:
        """Check every value; raises :class:`UsageError`."""
        FormatRegistry.get(self.format)
        rule = RuleRegistry.get(self.rule)
        if self.rounding not in ROUNDINGS:
            raise unknown("rounding", self.rounding, ROUNDINGS)
        if self.block is not None and (not rule.any_block or self.block < 1):
            own = "whole tensors" if rule.block is None else f"blocks of {rule.block}"
            allowed = "one value or more to a block" if rule.any_block else f"{own} and no other size"
            raise UsageError(f"A block of {self.block} does not suit scaling rule {self.rule!r}; it takes {allowed}.")
        if not 0 < self.q_scalar < math.inf:
            raise UsageError(f"q_scalar is {self.q_scalar}; the factor on the scale must be positive and finite.")

    @property
    def number_format(self) -> type[FloatFormat]:
        """The format."""
        return FormatRegistry.get(self.format)

    @property
    def scaling_rule(self) -> type[ScalingRule]:
        """The rule."""
        return RuleRegistry.get(self.rule)

    def blocks(self) -> int | None:
        """Return how many values of a row share a scale; ``None`` for all of the tensor."""
        return self.block or self.scaling_rule.block

    def scales(self, values: Tensor, earlier: Tensor | None = None) -> Tensor:
        """Return the float32 scales of a tensor: its shape with blocks in place of the last dimension, or one number.

        ``earlier`` holds the largest magnitudes of earlier tensors, for rules with a history; zeros are none yet.
        """
        largest = as_float32(largest_magnitudes(refuse_other_types(values), self.blocks()))
        if self.scaling_rule.history and earlier is not None:
            before = earlier.max().to(largest)
            largest = torch.where(before > 0, before, largest)
        scales = self.scaling_rule().scales(largest, self.number_format) * self.q_scalar
        return scales.clamp_max(torch.finfo(torch.float32).max)

    def __call__(
        self, values: Tensor, *, generator: torch.Generator | None = None, earlier: Tensor | None = None
    ) -> Tensor:
        """Return the tensor after quantisation and dequantisation, in its own type.

        Raises :class:`UsageError` for integers and complex numbers, and for stochastic rounding without a generator.
        Shapes without values come back as they are.
        """
        return self.with_scales(values, self.scales(values, earlier), generator)

    def with_scales(self, values: Tensor, scales: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Do the same with scales that are given; where a scale is 0, all but NaN becomes 0."""
        divisors = torch.where(scales > 0, scales, 1.0)
        scaled = computable(values) / spread_over(divisors, values, self.blocks())
        rounded = self.rounded(scaled, generator) * spread_over(scales, values, self.blocks())
        return saturated(rounded, values.dtype).to(values.dtype)

    def rounded(self, scaled: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Return numbers of the format (of its continuation, if soft) for values that were divided by their scales."""
        if self.rounding == "soft":
            return to_continued_grid(saturated(scaled, scaled.dtype), self.number_format)
        if self.rounding == "nearest":
            return to_grid(scaled, self.number_format)
        if generator is None:
            raise UsageError("Stochastic rounding draws from a generator of its own; pass generator=torch.Generator().")
        return to_grid(scaled, self.number_format, stochastic(generator))

    def counted(
        self, values: Tensor, *, generator: torch.Generator | None = None, earlier: Tensor | None = None
    ) -> tuple[Tensor, Counts]:
        """Return the same tensor with counts of what was lost."""
        scales = self.scales(values, earlier)
        rounded = self.with_scales(values, scales, generator)
        return rounded, count(values, rounded, spread_over(self.limits(scales), values, self.blocks()), scales)

    def limits(self, scales: Tensor) -> Tensor:
        """Return the largest magnitudes that do not overflow, exact in float64.

        Where the scale is 0 there is no limit: what is lost there is lost to underflow.
        """
        return torch.where(scales > 0, scales.double() * self.number_format.maximum, torch.inf)


def refuse_other_types(values: Tensor) -> Tensor:
    """Return the tensor; raises :class:`UsageError` if it does not hold real floating-point numbers."""
    if not values.is_floating_point():
        raise UsageError(f"A tensor of {values.dtype} cannot be cast to a narrow format; convert it to float32 first.")
    return values


def computable(values: Tensor) -> Tensor:
    """Return the tensor in the type in which casts compute: float32, or float64 if that is its own."""
    return values if values.dtype in (torch.float32, torch.float64) else values.float()


def largest_magnitudes(values: Tensor, block: int | None) -> Tensor:
    """Return the largest finite magnitude of each block of a row, or of all (zero-dimensional); 0 where is none."""
    finite = torch.where(values.isfinite(), values, 0.0).abs()
    if block is None:
        return finite.amax() if finite.numel() else finite.new_zeros(())
    return in_blocks(finite, block).amax(-1)


def in_blocks(values: Tensor, block: int) -> Tensor:
    """View rows as blocks, the last one filled up with zeros; a zero-dimensional tensor is a row of one."""
    rows = values.reshape(1) if not values.ndim else values
    missing = -rows.shape[-1] % block
    padded = torch.nn.functional.pad(rows, (0, missing)) if missing else rows
    return padded.reshape(*rows.shape[:-1], padded.shape[-1] // block, block)


def spread_over(scales: Tensor, values: Tensor, block: int | None) -> Tensor:
    """Repeat each block's scale for its values."""
    if block is None:
        return scales
    length = values.shape[-1] if values.ndim else 1
    return scales.repeat_interleave(block, -1)[..., :length].reshape(values.shape)


def as_float32(largest: Tensor) -> Tensor:
    """Round magnitudes up to float32, but to its largest number at most; narrower ones are exact."""
    if largest.dtype != torch.float64:
        return largest.float()
    narrow = largest.float()
    short = narrow.double() < largest
    covering = torch.where(short, torch.nextafter(narrow, torch.full_like(narrow, torch.inf)), narrow)
    return covering.clamp_max(torch.finfo(torch.float32).max)


def saturated(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the values, clamped to the finite numbers of a type; NaN stays NaN."""
    limit = torch.finfo(dtype).max
    return values.clamp(-limit, limit)
