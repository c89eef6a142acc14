"""Scaling rules: the divisors that fit a tensor into a format's range before its cast."""

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from ...errors import require
from ...registry import Registry
from .formats import E4M3, FloatFormat, to_grid

BIAS, MANTISSA_BITS, MANTISSA = 127, 23, 0x7FFFFF  # exponent bias, mantissa size and mantissa mask of float32
SUBNORMAL = 1 << (MANTISSA_BITS - 1)  # the bits of 2^-127, the smallest scale in E8M0
ROW = 2**31 - 1  # block size that stands for whole rows of any length


class ScalingRule(ABC):
    """Rule that computes scales from the largest magnitudes; one scale for each block along the last dimension.

    Casts, layers and hooks use registered subclasses by name. A value x is cast as scale · q(x / scale); with a scale
    of 0, all values become 0.
    """

    name: ClassVar[str] = ""
    block: ClassVar[int | None] = None
    """Number of elements along the last dimension that share a scale; ``None``: the whole tensor."""
    any_block: ClassVar[bool] = False
    """Whether a cast may choose another block size."""
    history: ClassVar[int] = 0
    """Number of earlier tensors of the same kind whose largest magnitudes determine the scale; 0: the tensor itself."""
    overflows: ClassVar[bool] = False
    """Whether scaled values may exceed the largest number of the format."""

    @abstractmethod
    def scales(self, largest: Tensor, number_format: type[FloatFormat]) -> Tensor:
        """Return the scales, float32 and non-negative, for the largest finite magnitudes of blocks.

        ``largest`` is float32 and finite, of any shape, including empty; the scales have the same shape.
        """


def check_rule(candidate: type[ScalingRule]) -> None:
    """Raise :class:`UsageError` for a class that is not a valid rule."""
    require(bool(candidate.name), f"Scaling rule class {candidate.__qualname__} needs a name.")
    rule, block = f"Scaling rule {candidate.name!r}", candidate.block
    require(block is None or block >= 1, f"{rule} has blocks of {block} elements; there must be one or more.")
    in_blocks = block is not None or candidate.any_block
    require(not (candidate.history and in_blocks), f"{rule} has blocks and a history; it must have only one of them.")
    problem = f"{rule} scales by earlier tensors, so values may exceed the range; set overflows = True."
    require(candidate.overflows or not candidate.history, problem)


RuleRegistry: Registry[type[ScalingRule]] = Registry("scaling rule", "loopscope.scaling_rules", check_rule)


def covering(largest: Tensor, maximum: float, epsilon: float = 0.0) -> Tensor:
    """Return the float32 scale largest / maximum + epsilon, rounded up if scale · maximum would be below largest."""
    scale = largest / maximum + epsilon
    is_short = scale.double() * maximum < largest
    constant = scale.detach()  # nextafter has no derivative before torch 2.10; the difference to it is exact
    return torch.where(
        is_short, scale + (torch.nextafter(constant, torch.full_like(constant, torch.inf)) - constant), scale
    )


class Covering(ScalingRule):
    """Scales that cover the range: largest magnitude / largest number of the format + epsilon, rounded up if needed.

    Without an epsilon, multiplying the values by a power of two changes only the scale, and the scale is 0 only if all
    values are 0.
    """

    epsilon: ClassVar[float] = 0.0

    def scales(self, largest: Tensor, number_format: type[FloatFormat]) -> Tensor:
        """Return largest / maximum + epsilon."""
        return covering(largest, number_format.maximum, self.epsilon)


@RuleRegistry.register
class PerTensor(Covering):
    """One scale for the tensor."""

    name = "tensor"


@RuleRegistry.register
class PerBlock(Covering):
    """A float32 scale for each 16 values of a row, or another number of values."""

    name = "block"
    block = 16
    any_block = True


@RuleRegistry.register
class PerRow(Covering):
    """A float32 scale for each row."""

    name = "row"
    block = ROW


@RuleRegistry.register
class MetisTensor(Covering):
    """One scale for the tensor, plus 1e-6 as in the Metis code (arXiv 2509.00404): small gradients underflow."""

    name = "metis_tensor"
    epsilon = 1e-6


@RuleRegistry.register
class MetisBlock(PerBlock):
    """A float32 scale for each 16 values of a row, plus 1e-9 as in the Metis code (arXiv 2509.00404)."""

    name = "metis_block"
    epsilon = 1e-9


@RuleRegistry.register
class Current(Covering):
    """One scale for the tensor, from its largest magnitude: the current scaling of FP8 training."""

    name = "current"


@RuleRegistry.register
class Delayed(Current):
    """One scale for the tensor, from the largest magnitude of the 16 earlier tensors (the first uses its own)."""

    name = "delayed"
    history = 16
    overflows = True


@RuleRegistry.register
class NVFP4(ScalingRule):
    """Blocks of 16 with a scale in E4M3, multiplied by a float32 scale of the tensor: NVIDIA's NVFP4.

    If a block's scale is rounded down, its largest value exceeds the range, by at most 1/16 if the scale is a normal
    E4M3 number. A block whose largest magnitude is at most 2^-10 / 448 of the tensor's has a scale of 0, and underflows
    completely. The tensor's scale is at least 2^-126, the smallest normal number.
    """

    name = "nvfp4"
    block = 16
    overflows = True

    def scales(self, largest: Tensor, number_format: type[FloatFormat]) -> Tensor:
        """Return tensor scale · e4m3(largest / maximum / tensor scale), with tensor scale = amax / (maximum · 448)."""
        if not largest.numel():
            return largest
        smallest = torch.finfo(torch.float32).smallest_normal
        tensor_scale = (largest.max() / (number_format.maximum * E4M3.maximum)).clamp_min(smallest)
        return to_grid(largest / number_format.maximum / tensor_scale, E4M3) * tensor_scale


class Microscaling(ScalingRule):
    """Blocks of 32 that share a power of two (E8M0), as in the OCP microscaling formats MXFP4, MXFP6 and MXFP8.

    The exponent is floor(log2(largest magnitude)) − floor(log2(largest number of the format)), clamped to −127..127.
    The rules differ in when they raise it by one.
    """

    block = 32

    def scales(self, largest: Tensor, number_format: type[FloatFormat]) -> Tensor:
        """Return 2^exponent; 2^-127 for a block of zeros."""
        exponent = _exponent(largest) - _exponent(torch.full_like(largest, number_format.maximum))
        return _power(exponent + self.raised(largest, exponent, number_format))

    @abstractmethod
    def raised(self, largest: Tensor, exponent: Tensor, number_format: type[FloatFormat]) -> Tensor:
        """Return 1 for blocks whose exponent is raised by one, else 0; ``largest`` is float32, ``exponent`` int32."""


@RuleRegistry.register
class Floor(Microscaling):
    """Never raise the exponent: larger values saturate, 2.3 % of a Gaussian in e2m1."""

    name = "mx_floor"
    overflows = True

    def raised(self, largest: Tensor, exponent: Tensor, number_format: type[FloatFormat]) -> Tensor:
        """Return zeros."""
        return torch.zeros_like(exponent)


@RuleRegistry.register
class Ceil(Microscaling):
    """Raise the exponent unless the largest magnitude is a power of two: nothing saturates, some range is unused."""

    name = "mx_ceil"

    def raised(self, largest: Tensor, exponent: Tensor, number_format: type[FloatFormat]) -> Tensor:
        """Return 1 for largest magnitudes that are not a power of two."""
        return ((largest.view(torch.int32) & MANTISSA) > 0).int()


@RuleRegistry.register
class RoundedCeil(Microscaling):
    """Use the smallest power of two without saturation, as NVIDIA's hardware does."""

    name = "mx_rceil"

    def raised(self, largest: Tensor, exponent: Tensor, number_format: type[FloatFormat]) -> Tensor:
        """Return 1 for blocks that would exceed the format's largest number; the comparison is exact."""
        return (_power(exponent) * number_format.maximum < largest).int()


@RuleRegistry.register
class Even(Microscaling):
    """Round the largest magnitude to the format's mantissa first: values within one rounding step saturate."""

    name = "mx_even"
    overflows = True

    def raised(self, largest: Tensor, exponent: Tensor, number_format: type[FloatFormat]) -> Tensor:
        """Return 1 for blocks whose rounded mantissa reaches 2; halves are rounded up."""
        # Adding half of the last kept mantissa bit increments the exponent if and only if the mantissa is rounded to 2.
        half = 1 << (MANTISSA_BITS - number_format.top_bits() - 1)
        return _exponent((largest.view(torch.int32) + half).view(torch.float32)) - _exponent(largest)


def to_e8m0(scales: Tensor) -> Tensor:
    """Round scales up to the powers of two of E8M0, 2^-127 to 2^127; 0 becomes 2^-127."""
    bits = scales.view(torch.int32)
    # Up to 2^-127 the exponent is -127 already. Above it, add 1 unless all mantissa bits are 0.
    return _power(_exponent(scales) + ((bits > SUBNORMAL) & (bits & MANTISSA > 0)).int())


def _exponent(magnitude: Tensor) -> Tensor:
    """Return floor(log2) of positive float32 numbers, int32; −127 for 0 and subnormal ones."""
    # The exponent bits of a normal number are floor(log2) + 127; those of 0 and subnormal numbers are 0.
    return (magnitude.view(torch.int32) >> MANTISSA_BITS) - BIAS


def _power(exponent: Tensor) -> Tensor:
    """Return 2^exponent, float32, the exponent (int32) clamped to E8M0's −127..127."""
    # 2^-127 is subnormal in float32, so its exponent bits are 0 and it needs a mantissa bit.
    normal = (exponent.clamp(1 - BIAS, BIAS) + BIAS) << MANTISSA_BITS
    return torch.where(exponent > -BIAS, normal, SUBNORMAL).view(torch.float32)
