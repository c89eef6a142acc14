"""Number formats of at most eight bits: their grids, and rounding to the grids."""

import math
from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor

from ...errors import UsageError
from ...registry import Registry

EXPONENTS = {torch.float32: (torch.int32, 23, 127), torch.float64: (torch.int64, 52, 1023)}
"""Integer dtype of the same size, bit position of the exponent, and exponent bias, by dtype of the computation."""


class FloatFormat:
    """A signed floating-point format with subnormals, described by its bits and its largest finite number.

    Casts, layers and hooks use registered subclasses by name. ``maximum`` is the largest finite number; larger codes
    (inf, NaN) are not used, since casts saturate. Without exponent bits all numbers are subnormal with a spacing of
    one: whole numbers.
    """

    name: ClassVar[str] = ""
    exponent_bits: ClassVar[int] = 0
    mantissa_bits: ClassVar[int] = 0
    maximum: ClassVar[float] = 0.0

    @classmethod
    def bias(cls) -> int:
        """Return the exponent bias, 2^(exponent bits − 1) − 1; for whole numbers, the bias with a spacing of one."""
        return int(2 ** (cls.exponent_bits - 1)) - 1 if cls.exponent_bits else 1 - cls.mantissa_bits

    @classmethod
    def top_exponent(cls) -> int:
        """Return floor(log2(maximum))."""
        return math.frexp(cls.maximum)[1] - 1

    @classmethod
    def top_bits(cls) -> int:
        """Return the number of bits after the leading one in ``maximum``: the mantissa's, fewer for whole numbers."""
        return cls.mantissa_bits - max(0, 1 - cls.bias() - cls.top_exponent())

    @classmethod
    def smallest_normal(cls) -> float:
        """Return the smallest normal number; smaller numbers are evenly spaced."""
        return 2.0 ** (1 - cls.bias())

    @classmethod
    def magnitudes(cls) -> Tensor:
        """Return every magnitude from 0 to ``maximum``, ascending; float64, on the CPU."""
        # With M mantissa bits and m from 0 to 2^M - 1: subnormal numbers are 2^(1 - bias) · m/2^M, normal ones are
        # 2^e · (1 + m/2^M).
        steps = [index / 2**cls.mantissa_bits for index in range(2**cls.mantissa_bits)]
        powers = [2.0**exponent for exponent in range(1 - cls.bias(), cls.top_exponent() + 1)]
        values = [cls.smallest_normal() * step for step in steps]
        values += [power * (1 + step) for power in powers for step in steps]
        return torch.tensor([value for value in values if value <= cls.maximum], dtype=torch.float64, device="cpu")


def check_format(candidate: type[FloatFormat]) -> None:
    """Raise :class:`UsageError` for a class that is not a valid format."""
    is_integer = candidate.exponent_bits == 0 and 1 <= candidate.maximum < 2**candidate.mantissa_bits
    if not (
        candidate.name and (1 <= candidate.exponent_bits <= 8 or is_integer) and 0 <= candidate.mantissa_bits <= 10
    ):
        raise UsageError(
            f"Format class {candidate.__qualname__} needs a name, 1 to 8 exponent_bits (0: whole numbers below "
            "2^mantissa_bits) and 0 to 10 mantissa_bits."
        )
    least = 1.0 if is_integer else candidate.smallest_normal()
    if not least <= candidate.maximum < 2.0**128 or candidate.magnitudes()[-1] != candidate.maximum:
        raise UsageError(
            f"The maximum of format {candidate.name!r}, {candidate.maximum}, is not one of its normal numbers."
        )


FormatRegistry: Registry[type[FloatFormat]] = Registry("format", "loopscope.formats", check_format)


@FormatRegistry.register
class E2M1(FloatFormat):
    """FP4 of the OCP microscaling specification: 0, 0.5, 1, 1.5, 2, 3, 4, 6; no inf, no NaN."""

    name = "e2m1"
    exponent_bits, mantissa_bits, maximum = 2, 1, 6.0


@FormatRegistry.register
class E3M2(FloatFormat):
    """FP6 with the wider range: up to 28; no inf, no NaN."""

    name = "e3m2"
    exponent_bits, mantissa_bits, maximum = 3, 2, 28.0


@FormatRegistry.register
class E2M3(FloatFormat):
    """FP6 with the finer grid: up to 7.5; no inf, no NaN."""

    name = "e2m3"
    exponent_bits, mantissa_bits, maximum = 2, 3, 7.5


@FormatRegistry.register
class E4M3(FloatFormat):
    """FP8 for values: up to 448; one code is NaN, none is inf (``float8_e4m3fn``)."""

    name = "e4m3"
    exponent_bits, mantissa_bits, maximum = 4, 3, 448.0


@FormatRegistry.register
class E5M2(FloatFormat):
    """FP8 for gradients: up to 57344; the highest exponent is inf and NaN, as in IEEE 754."""

    name = "e5m2"
    exponent_bits, mantissa_bits, maximum = 5, 2, 57344.0


@FormatRegistry.register
class INT8(FloatFormat):
    """Whole numbers of eight bits, from -127 to 127: without -128, so that the grid is symmetric."""

    name = "int8"
    exponent_bits, mantissa_bits, maximum = 0, 7, 127.0


Round = Callable[[Tensor], Tensor]
"""A function that rounds a tensor to whole numbers."""


def to_grid(values: Tensor, number_format: type[FloatFormat], round_: Round = torch.round) -> Tensor:
    """Round to the format's numbers; larger magnitudes, and inf, saturate. NaN stays NaN, and -0 stays -0.

    Ties round to the even multiple of the spacing, which is the even mantissa (without mantissa bits: up).

    Args:
        values: float32 or float64, of any shape.
        number_format: the format.
        round_: rounds multiples of the spacing; by default to nearest, ties to even.
    """
    clamped = clamped_to(values, number_format.maximum)
    return _round_to_spacing(clamped, _exponent_below(clamped, number_format), number_format, round_)


def clamped_to(values: Tensor, limit: float) -> Tensor:
    """Return the values, clamped to ``±limit``; NaNs keep their bits.

    The compiled ``clamp`` sets all bits of a NaN. Comparisons keep them, and are faster than ``clamp`` when compiled,
    but slower when not.
    """
    if not torch.compiler.is_compiling():
        return values.clamp(-limit, limit)
    below = torch.where(values > limit, limit, values)
    return torch.where(below < -limit, -limit, below)


def to_continued_grid(values: Tensor, number_format: type[FloatFormat]) -> Tensor:
    """Round to nearest without saturating: the grid continues beyond the largest number with its last spacing.

    This is the cast of the published Metis code (arXiv 2509.00404), which almost preserves overflowing values: 9.5
    becomes 10, although e2m1 ends at 6. No hardware does that.
    """
    top = max(number_format.top_exponent(), 1 - number_format.bias())
    return _round_to_spacing(values, _exponent_below(values, number_format, top), number_format, torch.round)


def by_draws(draws: Tensor) -> Round:
    """Return stochastic rounding by numbers uniform in [0, 1): away from 0 if a number is below the fraction.

    The mean is then the value, except that the probability is rounded up to a multiple of 2^-24.
    """

    def round_(values: Tensor) -> Tensor:
        magnitude = values.abs()
        below = magnitude.floor()
        return torch.copysign(below + (draws < magnitude - below).to(values.dtype), values)

    return round_


def _exponent_below(values: Tensor, number_format: type[FloatFormat], top: int | None = None) -> Tensor:
    """Return the bits of the largest power of two up to the magnitude, clamped to [smallest normal number, 2^top].

    Without ``top``, a NaN gives the bits of inf.
    """
    # Masking sign and mantissa bits of an IEEE number leaves 2^floor(log2(|x|)), for normal x.
    integers, place, bias = EXPONENTS[values.dtype]
    bits = values.view(integers) & ((2 * bias + 1) << place)
    smallest = (1 - number_format.bias() + bias) << place
    return bits.clamp(smallest, None if top is None else (top + bias) << place)


def _round_to_spacing(values: Tensor, exponent: Tensor, number_format: type[FloatFormat], round_: Round) -> Tensor:
    """Round to multiples of the spacing 2^exponent / 2^mantissa bits; the spacing and its inverse are exact."""
    # Subtracting from the exponent bits divides by a power of two. The inverse of 2^e, with the exponent bits e + bias,
    # has the exponent bits 2·bias − (e + bias).
    _, place, bias = EXPONENTS[values.dtype]
    finer = number_format.mantissa_bits << place
    spacing = (exponent - finer).view(values.dtype)
    if not torch.compiler.is_compiling():
        return round_(values / spacing) * spacing
    return round_(values * ((2 * bias << place) + finer - exponent).view(values.dtype)) * spacing
