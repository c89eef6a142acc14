"""Quantise and dequantise: a tensor as it would be after a trip through a narrow format, and what the trip cost."""

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
MARGIN = 64  # largest exponent of a margin; beyond it a scale soon leaves float32


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
        rows: rows of a matrix that share their scales, for rules with blocks: a block is then ``rows`` by ``block``.
        q_scalar: factor on the scale; below 1, values leave the range.
        scale_dtype: ``float32``, or ``e8m0``: the scale is raised to the next power of two, from 2^-127 to 2^127.
        history: earlier tensors whose largest magnitudes are remembered, for rules with a history; by default its own.
        margin: the scale is multiplied by 2^margin, so that values may grow so much until they leave the range.
        amax: which of the remembered magnitudes gives the scale: the ``max`` of all or the ``most_recent``.
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
            own = {None: "whole tensors", ROW: "whole rows"}.get(rule.block, f"blocks of {rule.block}")
            allowed = "one value or more to a block" if rule.any_block else f"{own} and no other size"
            raise UsageError(f"A block of {self.block} does not suit scaling rule {self.rule!r}; it takes {allowed}.")
        if self.rows < 1 or (self.rows > 1 and rule.block in (None, ROW)):
            raise UsageError(
                f"{self.rows} rows to a block do not suit scaling rule {self.rule!r}; choose one or more under a rule "
                "with blocks, such as block or nvfp4, and 1 under any other."
            )
        too_short = self.history is not None and self.history < 1
        if too_short or not (rule.history or (self.history, self.amax) == (None, "max")):
            raise UsageError(
                f"A history of {self.history} and amax {self.amax!r} do not suit scaling rule {self.rule!r}; a history "
                "is of one tensor or more, and only rules that scale by earlier tensors, such as delayed, have one."
            )
        if not (isinstance(self.q_scalar, int | float) and 0 < self.q_scalar < math.inf):
            raise UsageError(f"q_scalar is {self.q_scalar!r}; the factor on the scale must be positive and finite.")
        if not -MARGIN <= self.margin <= MARGIN:
            raise UsageError(f"The margin is {self.margin}; it is an exponent of two from -{MARGIN} to {MARGIN}.")

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
        """How scales follow from magnitudes."""
        factor, powers_of_two = self.q_scalar * 2.0**self.margin, self.scale_dtype == "e8m0"
        return Scaling(self.scaling_rule, self.number_format, factor, self.blocks(), powers_of_two)

    def blocks(self) -> int | None:
        """Return how many values of a row share a scale; ``None`` for all of the tensor."""
        return self.block or self.scaling_rule.block

    def remembered(self) -> int:
        """Return of how many earlier tensors the largest magnitudes are kept; 0 for rules without a history."""
        return self.history or self.scaling_rule.history

    def past(self, earlier: Tensor) -> Tensor:
        """Return those of the largest magnitudes of earlier tensors, the newest last, by which the cast scales."""
        kept = earlier.reshape(-1)[-self.remembered() :]
        return kept[-1:] if self.amax == "most_recent" else kept

    def scales(self, values: Tensor, earlier: Tensor | None = None) -> Tensor:
        """Return the float32 scales of a tensor: its shape with blocks in place of the last dimension, or one number.

        ``earlier`` holds the largest magnitudes of earlier tensors, the newest last, for rules with a history; zeros
        are none yet.
        """
        return self._scales_of(self._laid_out(refuse_other_types(values)), earlier)

    def __call__(
        self, values: Tensor, *, generator: torch.Generator | None = None, earlier: Tensor | None = None
    ) -> Tensor:
        """Return the tensor after quantisation and dequantisation, in its own type.

        Raises :class:`UsageError` for integers and complex numbers, and for stochastic rounding without a generator.
        Shapes without values come back as they are.
        """
        layout = self._laid_out(refuse_other_types(values))
        draws = self._draws(layout, generator)
        if earlier is not None and self.scaling_rule.history:
            return self._cast(layout, self._scales_of(layout, earlier), draws)
        return layout.values(COMPILER.run(kernels.scale_and_cast, layout.blocks, draws, self.scaling, self.rounding))

    def counted(
        self, values: Tensor, *, generator: torch.Generator | None = None, earlier: Tensor | None = None
    ) -> tuple[Tensor, Counts]:
        """Return what calling the cast returns, and counts of what was lost."""
        layout = self._laid_out(refuse_other_types(values))
        draws = self._draws(layout, generator)
        is_delayed = earlier is not None and self.scaling_rule.history
        scales = self._scales_of(layout, earlier) if is_delayed else None
        fast = self._counted_in_one(layout, draws, scales)
        if fast is not None:
            return fast
        scales = self._scales_of(layout, None) if scales is None else scales
        rounded = self._cast(layout, scales, draws)
        limits = self.limits(scales).reshape(scales.numel(), 1) if scales.ndim else self.limits(scales)
        return rounded, count(layout.blocks, self._laid_out(rounded).blocks, limits, scales, values.numel())

    def limits(self, scales: Tensor) -> Tensor:
        """Return the largest magnitudes that do not overflow, exact in float64.

        Where the scale is 0 there is no limit: what is lost there is lost to underflow.
        """
        return torch.where(scales > 0, scales.double() * self.number_format.maximum, torch.inf)

    def _laid_out(self, values: Tensor) -> Layout:
        return Layout.of(values, self.blocks(), self.rows)

    def _scales_of(self, layout: Layout, earlier: Tensor | None) -> Tensor:
        if layout.per_row is not None:
            return layout.scales(COMPILER.run(kernels.scales_of, layout.blocks, self.scaling))
        largest = COMPILER.run(kernels.largest_in, layout.blocks)
        if earlier is not None and self.scaling_rule.history:
            largest = kernels.delayed(largest, self.past(earlier))
        return kernels.scales_for(largest, self.scaling)

    def _cast(self, layout: Layout, scales: Tensor, draws: Tensor | None) -> Tensor:
        of_blocks = scales if layout.per_row is None else scales.reshape(-1)
        arguments = (layout.blocks, of_blocks, draws, self.number_format, self.rounding)
        return layout.values(COMPILER.run(kernels.cast, *arguments))

    def _counted_in_one(
        self, layout: Layout, draws: Tensor | None, scale: Tensor | None
    ) -> tuple[Tensor, Counts] | None:
        """Return the cast and its counts from the compiled loop that does both, or ``None`` where it cannot be had.

        ``scale`` is given where it comes from earlier tensors.
        """
        shape = layout.in_chunks()
        if shape is None:
            return None
        chunks = layout.blocks.view(shape)
        draws = None if draws is None else draws.view(shape)
        given = (chunks, kernels.nothing_for(chunks), scale, draws, self.scaling, self.rounding)
        found = COMPILER.attempt(kernels.cast_and_count, *given)
        if found is None or not kernels.was_counted(found[1], found[2], layout.shape.numel()):
            return None
        rounded, sums, maxima = found
        sums[SUMS.index("total_elements")] = layout.shape.numel()
        return layout.values(rounded.view(layout.blocks.shape)), Counts(sums, maxima)

    def _draws(self, layout: Layout, generator: torch.Generator | None) -> Tensor | None:
        """Draw what stochastic rounding needs, in the order of the tensor's values."""
        if self.rounding != "stochastic":
            return None
        if generator is None:
            raise UsageError("Stochastic rounding draws from a generator of its own; pass generator=torch.Generator().")
        if layout.blocks.is_meta:
            return torch.empty_like(layout.blocks, dtype=torch.float32)
        draws = torch.rand(layout.shape, generator=generator, device=layout.blocks.device, dtype=torch.float32)
        return self._laid_out(draws).blocks


def refuse_fractions(owner: str, **numbers: object) -> None:
    """Raise :class:`UsageError` for a number that is neither whole nor ``None``."""
    for name, value in numbers.items():
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            raise UsageError(f"{name} of {owner} is {value!r}; it must be a whole number.")


def refuse_other_types(values: Tensor) -> Tensor:
    """Return the tensor; raises :class:`UsageError` if it does not hold real floating-point numbers."""
    if not values.is_floating_point():
        raise UsageError(f"A tensor of {values.dtype} cannot be cast to a narrow format; convert it to float32 first.")
    return values


def largest_magnitudes(values: Tensor, block: int | None) -> Tensor:
    """Return the largest finite magnitude of each block of a row, or of all (zero-dimensional); 0 where is none."""
    layout = Layout.of(values, block)
    return layout.scales(COMPILER.run(kernels.largest_in, layout.blocks))
