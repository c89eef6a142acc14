"""Scaling rules: by what a tensor is divided before it is cast, so that it fills the format's range."""

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from ...errors import require
from ...registry import Registry
from .formats import E4M3, FloatFormat, to_grid

BIAS, MANTISSA_BITS, MANTISSA = 127, 23, 0x7FFFFF  # of float32
SUBNORMAL = 1 << (MANTISSA_BITS - 1)  # the bits of 2^-127, the smallest scale in E8M0
ROW = 2**31 - 1  # as a size of blocks: whole rows, however long


class ScalingRule(ABC):
    """How scales follow from the largest magnitudes; one scale for each block along the last dimension.

    Registered subclasses are known by name to the casts, the layers and the observer. A value x is cast as
    scale · q(x / scale); where the scale is 0, all values become 0.
    """

    name: ClassVar[str] = ""
    block: ClassVar[int | None] = None
    """Elements that share a scale, counted along the last dimension; ``None``: the whole tensor."""
    any_block: ClassVar[bool] = False
    """Another size of block may be asked for."""
    history: ClassVar[int] = 0
    """Earlier tensors of the same kind whose largest magnitudes give the scale, instead of the tensor's own."""
    overflows: ClassVar[bool] = False
    """Values may exceed the largest number of the format."""

    @abstractmethod
    def scales(self, largest: Tensor, number_format: type[FloatFormat]) -> Tensor:
        """Return the scales, float32 and not below 0, for the largest finite magnitudes of blocks.

        ``largest`` is float32 and finite, of any shape, which the scales share; it may be empty.
        """


def check_rule(found: type[ScalingRule]) -> None:
    """Refuse a class that describes no rule; raises :class:`UsageError` that says what to change."""
    require(bool(found.name), f"Scaling rule class {found.__qualname__} needs a name.")
    rule, block = f"Scaling rule {found.name!r}", found.block
    require(block is None or block >= 1, f"{rule} has blocks of {block} elements; there must be one or more.")
    in_blocks = block is not None or found.any_block
    require(not (found.history and in_blocks), f"{rule} has blocks and a history; a history is of whole tensors.")
    reason = f"{rule} scales by earlier tensors, so that values may leave the range; set overflows = True."
    require(found.overflows or not found.history, reason)


RuleRegistry: Registry[type[ScalingRule]] = Registry("scaling rule", "loopscope.scaling_rules", check_rule)


def covering(largest: Tensor, maximum: float, epsilon: float = 0.0) -> Tensor:
    """Return the float32 scale largest / maximum + epsilon, rounded up where it would not quite cover the range."""
    scale = largest / maximum + epsilon
    short = scale.double() * maximum < largest
    held = scale.detach()  # nextafter has no derivative before torch 2.10; the difference to it is exact
    return torch.where(short, scale + (torch.nextafter(held, torch.full_like(held, torch.inf)) - held), scale)


class Covering(ScalingRule):
    """The largest magnitude over the format's, rounded up where it would not quite cover the range, plus an epsilon.

    Without an epsilon, powers of two on the values change nothing but the scale, which is 0 only where all values are.
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
    """A float32 scale for each 16 values of a row, or for another number of them."""

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
    """One scale for the tensor, plus 1e-6 as published for Metis (arXiv 2509.00404): small gradients underflow."""

    name = "metis_tensor"
    epsilon = 1e-6


@RuleRegistry.register
class MetisBlock(PerBlock):
    """A float32 scale for each 16 values of a row, plus 1e-9 as published for Metis (arXiv 2509.00404)."""

    name = "metis_block"
    epsilon = 1e-9


@RuleRegistry.register
class Current(Covering):
    """One scale for the tensor, its own largest magnitude over the format's: the current scaling of FP8 training."""

    name = "current"


@RuleRegistry.register
class Delayed(Current):
    """One scale for the tensor, from the largest magnitude of the 16 tensors before it (the first: its own)."""

    name = "delayed"
    history = 16
    overflows = True


@RuleRegistry.register
class NVFP4(ScalingRule):
    """Blocks of 16 with a scale in E4M3, on top of a float32 scale of the tensor: NVIDIA's NVFP4.

    Rounding the block's scale down lets its largest value leave the range, by at most 1/16 while the scale is a normal
    E4M3 number. A block whose scale becomes 0, since its largest magnitude is 2^-10 / 448 of the tensor's or less, is
    lost to underflow. The tensor's scale is 2^-126 at least, the smallest normal number.
    """

    name = "nvfp4"
    block = 16
    overflows = True

    def scales(self, largest: Tensor, number_format: type[FloatFormat]) -> Tensor:
        """Return tensor scale · e4m3(largest / maximum / tensor scale), with tensor scale = amax / (maximum · 448)."""
        if not largest.numel():
            return largest
        smallest = torch.finfo(torch.float32).smallest_normal
        of_tensor = (largest.max() / (number_format.maximum * E4M3.maximum)).clamp_min(smallest)
        return to_grid(largest / number_format.maximum / of_tensor, E4M3) * of_tensor


class Microscaling(ScalingRule):
    """Blocks of 32 that share a power of two (E8M0), as in the OCP microscaling formats MXFP4, MXFP6 and MXFP8.

    The exponent is that of the largest magnitude less that of the format's largest number, clamped to −127..127; the
    rules differ in what they do with the rest of the magnitude.
    """

    block = 32

    def scales(self, largest: Tensor, number_format: type[FloatFormat]) -> Tensor:
        """Return 2^exponent; 2^-127 for a block of zeros."""
        exponent = _exponent(largest) - _exponent(torch.full_like(largest, number_format.maximum))
        return _power(exponent + self.raised(largest, exponent, number_format))

    @abstractmethod
    def raised(self, largest: Tensor, exponent: Tensor, number_format: type[FloatFormat]) -> Tensor:
        """Return where the exponent is raised by one; ``largest`` is float32, ``exponent`` int32."""


@RuleRegistry.register
class Floor(Microscaling):
    """The exponent as it is: what lies above the format's largest number saturates, 2.3 % of a Gaussian in e2m1."""

    name = "mx_floor"
    overflows = True

    def raised(self, largest: Tensor, exponent: Tensor, number_format: type[FloatFormat]) -> Tensor:
        """Raise none."""
        return torch.zeros_like(exponent)


@RuleRegistry.register
class Ceil(Microscaling):
    """The exponent raised unless the largest magnitude is a power of two: nothing saturates, some range is unused."""

    name = "mx_ceil"

    def raised(self, largest: Tensor, exponent: Tensor, number_format: type[FloatFormat]) -> Tensor:
        """Raise where the mantissa is not 1."""
        return ((largest.view(torch.int32) & MANTISSA) > 0).int()


@RuleRegistry.register
class RoundedCeil(Microscaling):
    """The smallest power of two with which nothing saturates, as NVIDIA's hardware finds it."""

    name = "mx_rceil"

    def raised(self, largest: Tensor, exponent: Tensor, number_format: type[FloatFormat]) -> Tensor:
        """Raise where the format's largest number would be exceeded; the comparison is exact."""
        return (_power(exponent) * number_format.maximum < largest).int()


@RuleRegistry.register
class Even(Microscaling):
    """The exponent of the largest magnitude rounded to the format's mantissa first; up to a rounding step saturates."""

    name = "mx_even"
    overflows = True

    def raised(self, largest: Tensor, exponent: Tensor, number_format: type[FloatFormat]) -> Tensor:
        """Raise where the rounded mantissa reaches 2; halves are rounded up."""
        half = 1 << (MANTISSA_BITS - number_format.top_bits() - 1)
        return _exponent((largest.view(torch.int32) + half).view(torch.float32)) - _exponent(largest)


def to_e8m0(scales: Tensor) -> Tensor:
    """Return the scales raised to the next power of two that E8M0 holds, 2^-127 to 2^127; 0 becomes 2^-127."""
    bits = scales.view(torch.int32)
    return _power(_exponent(scales) + ((bits > SUBNORMAL) & (bits & MANTISSA > 0)).int())


def _exponent(magnitude: Tensor) -> Tensor:
    """Return floor(log2) of positive float32 numbers, int32; −127 for 0 and subnormal ones."""
    return (magnitude.view(torch.int32) >> MANTISSA_BITS) - BIAS


def _power(exponent: Tensor) -> Tensor:
    """Return 2^exponent, float32, the exponent (int32) clamped to E8M0's −127..127."""
    normal = (exponent.clamp(1 - BIAS, BIAS) + BIAS) << MANTISSA_BITS
    return torch.where(exponent > -BIAS, normal, SUBNORMAL).view(torch.float32)
