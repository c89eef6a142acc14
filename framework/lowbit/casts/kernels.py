"""Tensors laid out in blocks that share a scale, and the arithmetic of casts on them, which the compiler can fuse."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .counts import MAXIMA, SUMS
from .formats import FloatFormat, by_draws, clamped_to, to_continued_grid, to_grid
from .scaling import ROW, ScalingRule, to_e8m0

FLOAT32_MAX = torch.finfo(torch.float32).max
CHUNK = 512
"""Values that are added up in float32, of longer blocks ``LONGEST``: their sums of squares are good to six digits."""
LONGEST = 2048
FIELD = 2.0 * LONGEST
"""A flag of a second kind: as many as ``LONGEST`` of it and of the first, 1, add up in float32 without rounding."""


def zero_padded(matrices: Tensor, columns: int, rows: int = 0) -> Tensor:
    """Return matrices (..., height, length), which may be empty, with columns of zeros added right and rows below."""
    if not (columns or rows):
        return matrices
    if matrices.numel():
        return torch.nn.functional.pad(matrices, (0, columns, 0, rows))
    # torch 2.9 does not pad an empty tensor.
    *outer, height, length = matrices.shape
    wide = torch.cat([matrices, matrices.new_zeros((*outer, height, columns))], -1)
    return torch.cat([wide, matrices.new_zeros((*outer, rows, length + columns))], -2)


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
        padded = zero_padded(matrices, -length % block, -height % rows)
        down, per_row = padded.shape[1] // rows, padded.shape[2] // block
        if rows > 1:
            padded = padded.reshape(len(matrices), down, rows, per_row, block).transpose(2, 3)
        return cls(padded.reshape(len(matrices) * down * per_row, rows * block), values.shape, per_row, rows)

    def in_chunks(self) -> torch.Size | None:
        """Return a shape (n, g, b) of n chunks of ``CHUNK`` values or one block; ``None`` if they are short or long.

        Of a tensor with one scale, pieces are the blocks, one to a chunk.
        """
        if self.per_row is None:
            group, block = 1, math.gcd(len(self.blocks), CHUNK)
        else:
            block = self.blocks.shape[-1]
            group = math.gcd(len(self.blocks), max(1, CHUNK // block))
        if not (self.blocks.numel() and CHUNK <= 2 * group * block <= 2 * LONGEST):
            return None  # short ones would cost more than the one loop saves
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
    scaled = computable(blocks) / torch.where(spread > 0, spread, 1.0)
    rounded = _rounded(scaled, draws, number_format, rounding)
    return saturated(rounded * spread, blocks.dtype).to(blocks.dtype)


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
    chunks: Tensor, nothing: Tensor, scale: Tensor | None, draws: Tensor | None, scaling: Scaling, rounding: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what :func:`scale_and_cast` does, with sums and maxima of :mod:`.counts`; 0 for the total.

    One loop with a few operations on each element; so it is right only where :func:`was_counted` says so after. Whole
    numbers are exact. Real ones are added up in float32 within a chunk and in float64 over the chunks, good to six
    digits.

    Args:
        chunks: (n, g, b), of n · g blocks; at most ``LONGEST`` values to a chunk.
        nothing: (n, g, 1), which :func:`nothing_for` returns. What is added to it has chunks and blocks for its
            dimensions, without which the compiler would make several loops.
        scale: the one scale, if it is not to follow from the tensor itself.
        draws: of the shape of ``chunks``, for stochastic rounding.
        scaling: how scales follow, and the format.
        rounding: how scaled values are rounded.
    """
    largest = largest_in(chunks)
    largest = largest.amax() if scaling.block is None else largest
    scales = scales_for(largest, scaling) if scale is None else scale
    reach = torch.where(scales > 0, scales, torch.inf)  # what has a scale of 0 is lost to underflow
    maximum = scaling.number_format.maximum
    limits, halves = limits_for(scales, maximum), limits_for(scales, maximum / 2)
    excess_max = torch.where(largest > limits, largest / reach, 0.0).amax().double() / maximum
    # Stored, or each would be computed once more for every value.
    stored = [_stored(each).expand(chunks.shape[:2]).unsqueeze(-1) for each in (scales, reach, limits, halves)]
    spread, divisor, limit, half = stored
    values = chunks.float() + nothing
    scaled = values / divisor
    rounded = (_rounded(scaled, draws, scaling.number_format, rounding) * spread).to(chunks.dtype)
    error, magnitude = rounded.float() - values, values.abs()
    under = (rounded == 0) & (magnitude > 0)
    flags = _in_chunks(torch.where(magnitude > half, FIELD, 0.0) + torch.where(under, 1.0, 0.0))
    upper = (flags / FIELD).floor()
    over = excess = flags.new_zeros(())
    # Otherwise scales follow from a tensor's own largest magnitudes, so that these are in range.
    if scaling.q_scalar < 1 or scaling.rule.overflows:
        over = _in_chunks(torch.where(magnitude > limit, 1.0, 0.0)).sum()
        excess = over + _in_chunks((scaled - clamped_to(scaled, maximum)).abs()).sum() / maximum
    sums = (
        torch.ones_like(over),
        (over > 0).double(),
        torch.zeros_like(over),
        over,
        (flags - upper * FIELD).sum(),
        torch.zeros_like(over),
        upper.sum(),
        excess,
        _in_chunks(error.square()).sum(),
        _in_chunks(values.square()).sum(),
    )
    return rounded, torch.stack(sums), torch.stack([excess_max, scales.amax().double(), 1 / reach.amin().double()])


def nothing_for(chunks: Tensor) -> Tensor:
    """Return (n, g, 1) numbers of -0, which change nothing that they are added to.

    Its steps of one along both n and g keep the compiler from making one dimension of n and g, or of g and b.
    """
    count, group = chunks.shape[:2]
    return chunks.new_full([count + group - 1], -0.0, dtype=torch.float32).unfold(0, group, 1).unsqueeze(-1)


def limits_for(scales: Tensor, maximum: float) -> Tensor:
    """Return the largest float32 magnitudes that are not above scale · maximum, which is rounded down; inf for scale 0.

    A float32 number exceeds scale · maximum if, and only if, it exceeds that.
    """
    exact = scales.double() * maximum
    near = exact.float()
    below = torch.where(near.double() > exact, (near.view(torch.int32) - 1).view(torch.float32), near)
    return torch.where(scales > 0, below, torch.inf)


def _in_chunks(numbers: Tensor) -> Tensor:
    return numbers.sum((1, 2)).double()


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
