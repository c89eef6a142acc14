"""Casts: quantisation of a tensor to a narrow format and back, with optional counts of the losses."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from ...errors import UsageError, unknown
from . import kernels
from .compiled import COMPILER
from .counts import SUMS, Counts, count
from .formats import FloatFormat, FormatRegistry
from .kernels import Layout, Scaling
from .scaling import ROW, RuleRegistry, ScalingRule

Rounding = Literal["nearest", "stochastic", "soft"]
ScaleType = Literal["float32", "e8m0"]
Algorithm = Literal["max", "most_recent"]
MARGIN = 64  # largest exponent of a margin; larger ones would move scales out of float32's range


@dataclass(frozen=True)
class Cast:
    """A format, a scaling rule and a rounding: x becomes scale · q(x / scale).

    The quotient and the product are float32 (float64 for float64 tensors); the result is rounded to the tensor's dtype,
    and saturates at the largest number of that dtype. Scales are float32 for all tensors: a float64 magnitude beyond
    float32's range does not raise the scale further, so it overflows under every rule. inf saturates, and NaN stays
    NaN; neither counts towards the largest magnitude.

    Args:
        format: the name of a registered format.
        rule: the name of a registered scaling rule.
        rounding: ``nearest`` (ties to even), ``stochastic``, or ``soft``: to nearest, but on a grid that continues
            beyond the format's largest number instead of saturating, as in the published Metis code.
        block: the number of values of a row that share a scale, for rules with ``any_block``; by default the rule's.
        rows: the number of rows of a matrix that share scales, for rules with blocks: blocks are ``rows`` by ``block``.
        q_scalar: a factor on the scale; below 1, values exceed the range.
        scale_dtype: ``float32``, or ``e8m0``: scales are rounded up to powers of two, from 2^-127 to 2^127.
        history: the number of earlier tensors whose largest magnitudes are kept, for rules with a history; by default
            the rule's.
        margin: the scale is multiplied by 2^margin, so that values can grow by that factor without overflow.
        amax: the statistic of the kept magnitudes that determines the scale: ``max`` or ``most_recent``.
    """

    format: str
    rule: str
    rounding: Rounding = "nearest"
    block: int | None = None
    q_scalar: float = 1.0
    rows: int = 1
    scale_dtype: ScaleType = "float32"
    history: int | None = None
    margin: int = 0
    amax: Algorithm = "max"

    def __post_init__(self) -> None:
        FormatRegistry.get(self.format)
        rule = RuleRegistry.get(self.rule)
        for name, choices in {"rounding": Rounding, "scale_dtype": ScaleType, "amax": Algorithm}.items():
            if vars(self)[name] not in get_args(choices):
                raise unknown(name, str(vars(self)[name]), get_args(choices))
        refuse_fractions("a cast", rows=self.rows, margin=self.margin, block=self.block, history=self.history)
        if self.block is not None and (not rule.any_block or self.block < 1):
            fixed_size = {None: "whole tensors", ROW: "whole rows"}.get(rule.block, f"blocks of {rule.block}")
            allowed = "one value or more to a block" if rule.any_block else f"{fixed_size} and no other size"
            raise UsageError(f"A block of {self.block} does not suit scaling rule {self.rule!r}; it takes {allowed}.")
        if self.rows < 1 or (self.rows > 1 and rule.block in (None, ROW)):
            raise UsageError(
                f"{self.rows} rows to a block do not suit scaling rule {self.rule!r}; choose one or more for a rule "
                "with blocks, such as block or nvfp4, and 1 for every other rule."
            )
        too_short = self.history is not None and self.history < 1
        if too_short or not (rule.history or (self.history, self.amax) == (None, "max")):
            raise UsageError(
                f"A history of {self.history} and amax {self.amax!r} do not suit scaling rule {self.rule!r}; a history "
                "has one tensor or more, and only rules that scale by earlier tensors, such as delayed, have one."
            )
        if not (isinstance(self.q_scalar, int | float) and 0 < self.q_scalar < math.inf):
            raise UsageError(f"q_scalar is {self.q_scalar!r}; the factor on the scale must be positive and finite.")
        if not -MARGIN <= self.margin <= MARGIN:
            raise UsageError(f"The margin is {self.margin}; it must be an exponent of two from -{MARGIN} to {MARGIN}.")

    @property
    def number_format(self) -> type[FloatFormat]:
        """The format."""
        return FormatRegistry.get(self.format)

    @property
    def scaling_rule(self) -> type[ScalingRule]:
        """The rule."""
        return RuleRegistry.get(self.rule)

    @property
    def scaling(self) -> Scaling:
        """The settings that determine scales from magnitudes."""
        factor, powers_of_two = self.q_scalar * 2.0**self.margin, self.scale_dtype == "e8m0"
        return Scaling(self.scaling_rule, self.number_format, factor, self.blocks(), powers_of_two)

    def blocks(self) -> int | None:
        """Return the number of values of a row that share a scale; ``None`` for the whole tensor."""
        return self.block or self.scaling_rule.block

    def history_length(self) -> int:
        """Return the number of earlier tensors whose largest magnitudes are kept; 0 for rules without a history."""
        return self.history or self.scaling_rule.history

    def relevant_history(self, earlier: Tensor) -> Tensor:
        """Return the part of the earlier largest magnitudes (newest last) that determines the scale."""
        kept = earlier.reshape(-1)[-self.history_length() :]
        return kept[-1:] if self.amax == "most_recent" else kept

    def scales(self, values: Tensor, earlier: Tensor | None = None) -> Tensor:
        """Return the float32 scales of a tensor: its shape with blocks in place of the last dimension, or one number.

        ``earlier`` contains the largest magnitudes of earlier tensors, newest last, for rules with a history; zeros
        stand for missing tensors.
        """
        return self._scales_of(self._layout(refuse_other_types(values)), earlier)

    def __call__(
        self, values: Tensor, *, generator: torch.Generator | None = None, earlier: Tensor | None = None
    ) -> Tensor:
        """Return the tensor after quantisation and dequantisation, in its dtype; empty tensors are allowed.

        Raises:
            UsageError: for integers and complex numbers, and for stochastic rounding without a generator.
        """
        layout = self._layout(refuse_other_types(values))
        draws = self._draws(layout, generator)
        if earlier is not None and self.scaling_rule.history:
            return self._cast(layout, self._scales_of(layout, earlier), draws)
        return layout.values(COMPILER.run(kernels.scale_and_cast, layout.blocks, draws, self.scaling, self.rounding))

    def with_counts(
        self, values: Tensor, *, generator: torch.Generator | None = None, earlier: Tensor | None = None
    ) -> tuple[Tensor, Counts]:
        """Return the cast tensor, and counts of the losses."""
        layout = self._layout(refuse_other_types(values))
        draws = self._draws(layout, generator)
        is_delayed = earlier is not None and self.scaling_rule.history
        scales = self._scales_of(layout, earlier) if is_delayed else None
        fused = self._fused_cast_and_count(layout, draws, scales)
        if fused is not None:
            return fused
        scales = self._scales_of(layout, None) if scales is None else scales
        rounded = self._cast(layout, scales, draws)
        limits = self.limits(scales).reshape(scales.numel(), 1) if scales.ndim else self.limits(scales)
        return rounded, count(layout.blocks, self._layout(rounded).blocks, limits, scales, values.numel())

    def limits(self, scales: Tensor) -> Tensor:
        """Return the largest magnitudes that do not overflow, exact in float64.

        A scale of 0 has an infinite limit, since all its losses are underflow.
        """
        return torch.where(scales > 0, scales.double() * self.number_format.maximum, torch.inf)

    def _layout(self, values: Tensor) -> Layout:
        return Layout.of(values, self.blocks(), self.rows)

    def _scales_of(self, layout: Layout, earlier: Tensor | None) -> Tensor:
        if layout.per_row is not None:
            return layout.scales(COMPILER.run(kernels.scales_of, layout.blocks, self.scaling))
        largest = COMPILER.run(kernels.largest_per_block, layout.blocks)
        if earlier is not None and self.scaling_rule.history:
            largest = kernels.delayed(largest, self.relevant_history(earlier))
        return kernels.scales_for(largest, self.scaling)

    def _cast(self, layout: Layout, scales: Tensor, draws: Tensor | None) -> Tensor:
        block_scales = scales if layout.per_row is None else scales.reshape(-1)
        arguments = (layout.blocks, block_scales, draws, self.number_format, self.rounding)
        return layout.values(COMPILER.run(kernels.cast, *arguments))

    def _fused_cast_and_count(
        self, layout: Layout, draws: Tensor | None, scale: Tensor | None
    ) -> tuple[Tensor, Counts] | None:
        """Cast and count in one compiled loop; return ``None`` if that is impossible or inexact.

        ``scale`` is given if it depends on earlier tensors.
        """
        shape = layout.in_chunks()
        if shape is None:
            return None
        chunks = layout.blocks.view(shape)
        draws = None if draws is None else draws.view(shape)
        arguments = (chunks, kernels.negative_zeros_for(chunks), scale, draws, self.scaling, self.rounding)
        results = COMPILER.attempt(kernels.cast_and_count, *arguments)
        if results is None or not kernels.counts_are_exact(results[1], results[2], layout.shape.numel()):
            return None
        rounded, sums, maxima = results
        sums[SUMS.index("total_elements")] = layout.shape.numel()
        return layout.values(rounded.view(layout.blocks.shape)), Counts(sums, maxima)

    def _draws(self, layout: Layout, generator: torch.Generator | None) -> Tensor | None:
        """Draw the random numbers for stochastic rounding, in the order of the tensor's values."""
        if self.rounding != "stochastic":
            return None
        if generator is None:
            raise UsageError("Stochastic rounding needs a separate generator; pass generator=torch.Generator().")
        if layout.blocks.is_meta:
            return torch.empty_like(layout.blocks, dtype=torch.float32)
        draws = torch.rand(layout.shape, generator=generator, device=layout.blocks.device, dtype=torch.float32)
        return self._layout(draws).blocks


def refuse_fractions(owner: str, **numbers: object) -> None:
    """Raise :class:`UsageError` for values that are neither whole numbers nor ``None``."""
    for name, value in numbers.items():
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            raise UsageError(f"{name} of {owner} is {value!r}; it must be a whole number.")


def refuse_other_types(values: Tensor) -> Tensor:
    """Return the tensor; raises :class:`UsageError` if its dtype is not real floating point."""
    if not values.is_floating_point():
        raise UsageError(f"A tensor of {values.dtype} cannot be cast to a narrow format; convert it to float32 first.")
    return values


def largest_magnitudes(values: Tensor, block: int | None) -> Tensor:
    """Return the largest finite magnitude of each block, or of the whole tensor (zero-dimensional); 0 if none."""
    layout = Layout.of(values, block)
    return layout.scales(COMPILER.run(kernels.largest_per_block, layout.blocks))
