"""Tensors laid out in blocks that share a scale, and the arithmetic of casts on them, which the compiler can fuse."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .counts import MAXIMA, SUMS
from .formats import FloatFormat, by_draws, clamped_to, to_continued_grid, to_grid
from .scaling import ROW, ScalingRule, to_e8m0

FLOAT32_MAX = torch.finfo(torch.float32).max
CHUNK = 2048
"""Values that are added up in float32 at most; so many flags of two kinds, 1 and ``FIELD``, add up without rounding."""
FIELD = 2.0 * CHUNK


@dataclass(frozen=True)
class Layout:
    """The values of a tensor in blocks.

    Args:
        blocks: (n, b), the last block of a row filled up with zeros; or flat (n), if all values share one scale.
        shape: the tensor's own shape.
        per_row: blocks to a row of the tensor; ``None`` for one scale in all.
        rows: rows of a matrix, the last two dimensions, to a block.
    """

    blocks: Tensor
    shape: torch.Size
    per_row: int | None
    rows: int = 1

    @classmethod
    def of(cls, values: Tensor, block: int | None, rows: int = 1) -> "Layout":
        """Lay a tensor out, in blocks of ``block`` values of a row, or of ``rows`` rows by ``block`` columns.

        A zero-dimensional tensor is a row of one, and a one-dimensional one a matrix of one row.
        """
        if block is None:
            return cls(values.reshape(-1), values.shape, None)
        height, length = (1, 1, *values.shape)[-2:]
        block = max(1, length) if block == ROW else block
        matrices = values.reshape(values.shape[:-2].numel(), height, length)
        missing = (0, -length % block, 0, -height % rows)
        padded = torch.nn.functional.pad(matrices, missing) if any(missing) else matrices
        down, per_row = padded.shape[1] // rows, padded.shape[2] // block
        if rows > 1:
            padded = padded.reshape(len(matrices), down, rows, per_row, block).transpose(2, 3)
        return cls(padded.reshape(len(matrices) * down * per_row, rows * block), values.shape, per_row, rows)

    def in_chunks(self, size: int) -> torch.Size | None:
        """Return a shape (n, g, b) of n chunks of at most ``size`` values; ``None`` if they would be many small ones.

        Of a tensor with one scale, pieces are the blocks, one to a chunk.
        """
        if self.per_row is None:
            group, block = 1, math.gcd(len(self.blocks), size)
        else:
            block = self.blocks.shape[-1]
            if block > size:
                return None
            group = math.gcd(len(self.blocks), size // block)
        if 8 * group * block < size:  # so many chunks would cost more than the one loop saves
            return None
        return torch.Size((self.blocks.numel() // (group * block), group, block))

    def scales(self, flat: Tensor) -> Tensor:
        """Return scales (n) in the tensor's shape with blocks in place of the last dimension; or the one scale."""
        if self.per_row is None:
            return flat
        down = [-(-self.shape[-2] // self.rows)] if len(self.shape) > 1 else []
        return flat.reshape((*self.shape[:-2], *down, self.per_row))

    def values(self, blocks: Tensor) -> Tensor:
        """Return values in blocks in the tensor's shape."""
        if self.rows > 1 and self.per_row is not None:
            height, length = self.shape[-2:] if len(self.shape) > 1 else (1, self.shape.numel())
            down, block = -(-height // self.rows), blocks.shape[-1] // self.rows
            tiles = blocks.reshape(self.shape[:-2].numel(), down, self.per_row, self.rows, block).transpose(2, 3)
            matrices = tiles.reshape(len(tiles), down * self.rows, self.per_row * block)
            return matrices[:, :height, :length].reshape(self.shape)
        if self.per_row is None or blocks.numel() == self.shape.numel():
            return blocks.reshape(self.shape)
        rows = blocks.reshape(*self.shape[:-1], self.per_row * blocks.shape[-1])
        return rows[..., : self.shape[-1] if self.shape else 1].reshape(self.shape)


@dataclass(frozen=True)
class Scaling:
    """How scales follow from magnitudes: classes in the place of names."""

    rule: type[ScalingRule]
    number_format: type[FloatFormat]
    q_scalar: float
    block: int | None  # values that share a scale; ``None``: all of a tensor
    powers_of_two: bool = False  # scales are raised to the next one, as E8M0 stores them


def largest_in(blocks: Tensor) -> Tensor:
    """Return the largest finite magnitude of each row of ``blocks`` (n, b), or of all of (n); 0 where is none."""
    magnitude = computable(blocks).abs()
    finite = torch.where(magnitude < torch.inf, magnitude, 0.0)
    return finite.amax(-1) if finite.numel() else finite.new_zeros(finite.shape[:-1])


def scales_for(largest: Tensor, scaling: Scaling) -> Tensor:
    """Return the float32 scales for largest magnitudes of any shape."""
    scales = scaling.rule().scales(as_float32(largest), scaling.number_format)
    if scaling.q_scalar != 1:
        scales = scales * scaling.q_scalar
    if scaling.powers_of_two:
        scales = to_e8m0(scales.clamp_max(FLOAT32_MAX))
    return scales.clamp_max(FLOAT32_MAX)


def delayed(largest: Tensor, earlier: Tensor) -> Tensor:
    """Return the largest magnitude of earlier tensors in the place of a tensor's own, if there were any."""
    before = earlier.max().to(largest)
    return torch.where(before > 0, before, largest)


def scales_of(blocks: Tensor, scaling: Scaling) -> Tensor:
    """Return the scales (n) of blocks (n, b), or the one of values (n)."""
    return scales_for(largest_in(blocks), scaling)


def scale_and_cast(blocks: Tensor, draws: Tensor | None, scaling: Scaling, rounding: str) -> Tensor:
    """Return blocks (n, b), or values (n), after the cast with scales of their own."""
    return cast(blocks, _stored(scales_of(blocks, scaling)), draws, scaling.number_format, rounding)


def _stored(tensor: Tensor) -> Tensor:
    """Return the tensor as one that the compiler keeps: it would rather compute it once more for every use."""
    return tensor.as_strided(tensor.shape, tensor.stride()) if torch.compiler.is_compiling() else tensor


def cast(
    blocks: Tensor, scales: Tensor, draws: Tensor | None, number_format: type[FloatFormat], rounding: str
) -> Tensor:
    """Return blocks (n, b) after the cast with scales (n), or values (n) after that with one scale.

    ``draws``, of the shape of ``blocks``, decide which way stochastic rounding goes.
    """
    spread = scales.unsqueeze(-1) if blocks.ndim > 1 else scales
    rounded = _rounded(_scaled(blocks, spread), draws, number_format, rounding)
    return saturated(rounded * spread, blocks.dtype).to(blocks.dtype)


def _scaled(values: Tensor, spread: Tensor) -> Tensor:
    return computable(values) / torch.where(spread > 0, spread, 1.0)


def _rounded(scaled: Tensor, draws: Tensor | None, number_format: type[FloatFormat], rounding: str) -> Tensor:
    if rounding == "soft":
        return to_continued_grid(saturated(scaled, scaled.dtype), number_format)
    return to_grid(scaled, number_format, torch.round if draws is None else by_draws(draws))


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


def cast_and_count(
    chunks: Tensor, zeros: Tensor, scale: Tensor | None, draws: Tensor | None, scaling: Scaling, rounding: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what :func:`scale_and_cast` does, with sums and maxima of :mod:`.counts`; 0 for the total.

    One loop with a few operations on each element; so it is right only where :func:`can_count` says so before and
    :func:`was_counted` after. Whole numbers are exact. Real ones are added up in float32 within a chunk and in float64
    over the chunks, good to six digits.

    Args:
        chunks: (n, g, b), of n · g blocks; at most ``CHUNK`` values to a chunk.
        zeros: (n, 1, 1). Everything that is computed has chunks and blocks for its dimensions because of them, without
            which the compiler would make several loops.
        scale: the one scale, if it is not to follow from the tensor itself.
        draws: of the shape of ``chunks``, for stochastic rounding.
        scaling: how scales follow, and the format.
        rounding: how scaled values are rounded.
    """
    largest = largest_in(chunks)
    largest = largest.amax() if scaling.block is None else largest
    scales = _stored(scales_for(largest, scaling)) if scale is None else scale
    scales = scales.expand(chunks.shape[:2]).unsqueeze(-1) + zeros
    maximum = scaling.number_format.maximum
    scaled = _scaled(chunks, scales)
    rounded = (_rounded(scaled, draws, scaling.number_format, rounding) * scales).to(chunks.dtype)
    values, result = chunks.float() + scales * 0.0, rounded.float()
    magnitude = values.abs()
    reach = torch.where(scales > 0, scales, torch.inf)  # what has a scale of 0 is lost to underflow
    under = (result == 0) & (magnitude > 0)
    flags = _in_chunks(torch.where(under, 1.0, torch.where(exceeds(magnitude, reach, maximum / 2), FIELD, 0.0)))
    upper = (flags / FIELD).floor()
    over = excess = flags.new_zeros(())
    # Otherwise scales follow from a tensor's own largest magnitudes, so that these are in range.
    if scaling.q_scalar < 1 or scaling.rule.overflows:
        beyond = exceeds(magnitude, reach, maximum)
        over = _in_chunks(torch.where(beyond, 1.0, 0.0)).sum()
        excess = over + _in_chunks(torch.where(beyond, scaled.abs() - maximum, 0.0)).sum() / maximum
    largest = largest.expand(chunks.shape[:2]).unsqueeze(-1)
    excess_max = torch.where(exceeds(largest, reach, maximum), largest / scales, 0.0).amax().double() / maximum
    sums = (
        torch.ones_like(over),
        (over > 0).double(),
        torch.zeros_like(over),
        over,
        (flags - upper * FIELD).sum(),
        torch.zeros_like(over),
        upper.sum(),
        excess,
        _in_chunks((result - values).square()).sum(),
        _in_chunks(values.square()).sum(),
    )
    return rounded, torch.stack(sums), torch.stack([excess_max, scales.amax().double(), 1 / reach.amin().double()])


def _in_chunks(numbers: Tensor) -> Tensor:
    return numbers.sum((1, 2)).double()


def exceeds(magnitude: Tensor, scales: Tensor, limit: float) -> Tensor:
    """Return, exactly, whether a magnitude is above scale · limit, for a limit that :func:`can_count` allows.

    With limit = 2^a - 2^b both products are exact, and by Sterbenz's lemma so is the difference where it is near.
    """
    power = 2.0 ** math.frexp(limit)[1]
    return magnitude - scales * power > scales * (limit - power)


def can_count(number_format: type[FloatFormat]) -> bool:
    """Return whether the format's largest number is a power of two less another, as one with a full mantissa is."""
    mantissa, _ = math.frexp(number_format.maximum)
    return math.frexp(1 - mantissa)[0] == 0.5


def was_counted(sums: Tensor, maxima: Tensor, elements: int) -> bool:
    """Return whether :func:`cast_and_count` was right: all finite, the results too, no square lost, no scale extreme.

    Nor may anything have overflowed under a rule that says that nothing does. A square below 2^-126 is not exact; where
    the mean of the squared errors is 2^20 times that, it does not show.
    """
    found = dict(zip((*SUMS, *MAXIMA), [*sums.tolist(), *maxima.tolist()], strict=True))
    return (
        all(map(math.isfinite, found.values()))
        and (found["total_overflow_elements"] > 0) == (found["excess_max"] > 0)
        and found["squared_error"] >= elements * 2.0**-106
        and max(found["scale_max"], found["inverse_scale_max"]) <= 2.0**100
    )
