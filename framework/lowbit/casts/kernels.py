"""Layout of tensors in blocks that share a scale, and the arithmetic of casts on blocks, which a compiler can fuse."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .counts import MAXIMA, SUMS
from .formats import FloatFormat, by_draws, clamped_to, to_continued_grid, to_grid
from .scaling import ROW, ScalingRule, to_e8m0

FLOAT32_MAX = torch.finfo(torch.float32).max
CHUNK = 512
"""Number of values summed in float32 (``LONGEST`` for longer blocks), so that sums of squares have six exact digits."""
LONGEST = 2048
FIELD = 2.0 * LONGEST
"""The value of the second of two flags, the first being 1: sums of up to ``LONGEST`` of each are exact in float32."""


def zero_padded(matrices: Tensor, columns: int, rows: int = 0) -> Tensor:
    """Pad matrices (..., height, length), which may be empty, with columns of zeros on the right and rows below."""
    if not (columns or rows):
        return matrices
    if matrices.numel():
        return torch.nn.functional.pad(matrices, (0, columns, 0, rows))
    # torch 2.9 cannot pad empty tensors.
    *outer, height, length = matrices.shape
    wide = torch.cat([matrices, matrices.new_zeros((*outer, height, columns))], -1)
    return torch.cat([wide, matrices.new_zeros((*outer, rows, length + columns))], -2)


@dataclass(frozen=True)
class Layout:
    """The values of a tensor in blocks.

    Args:
        blocks: (n, b), the last block of a row padded with zeros; or flat (n), if all values share one scale.
        shape: the tensor's shape.
        per_row: the number of blocks in a row of the tensor; ``None`` for one common scale.
        rows: the number of rows of a matrix (the last two dimensions) in a block.
    """

    blocks: Tensor
    shape: torch.Size
    per_row: int | None
    rows: int = 1

    @classmethod
    def of(cls, values: Tensor, block: int | None, rows: int = 1) -> "Layout":
        """Return the layout of a tensor in blocks of ``rows`` rows by ``block`` columns.

        A zero-dimensional tensor counts as a row of one value, a one-dimensional one as a matrix of one row.
        """
        if block is None:
            return cls(values.reshape(-1), values.shape, None)
        height, length = (1, 1, *values.shape)[-2:]
        block = max(1, length) if block == ROW else block
        matrices = values.reshape(values.shape[:-2].numel(), height, length)
        padded = zero_padded(matrices, -length % block, -height % rows)
        down, per_row = padded.shape[1] // rows, padded.shape[2] // block
        # (matrices, down · rows, per_row · block) → (matrices, down, per_row, rows, block): blocks side by side.
        if rows > 1:
            padded = padded.reshape(len(matrices), down, rows, per_row, block).transpose(2, 3)
        return cls(padded.reshape(len(matrices) * down * per_row, rows * block), values.shape, per_row, rows)

    def in_chunks(self) -> torch.Size | None:
        """Return a shape (n, g, b) of n chunks with g blocks each; ``None`` if chunks would be too short or too long.

        A chunk has at most ``CHUNK`` values, or one longer block. A tensor with one scale is cut into pieces of up to
        ``CHUNK`` values, one per chunk.
        """
        if self.per_row is None:
            # The greatest common divisor divides the length, so that no chunk is shorter than the others.
            group, block = 1, math.gcd(len(self.blocks), CHUNK)
        else:
            block = self.blocks.shape[-1]
            group = math.gcd(len(self.blocks), max(1, CHUNK // block))
        if not (self.blocks.numel() and CHUNK <= 2 * group * block <= 2 * LONGEST):
            return None  # short chunks would cost more than the fused loop saves
        return torch.Size((self.blocks.numel() // (group * block), group, block))

    def scales(self, flat: Tensor) -> Tensor:
        """Return scales (n) in the tensor's shape with blocks in place of the last dimension; or the common scale."""
        if self.per_row is None:
            return flat
        down = [-(-self.shape[-2] // self.rows)] if len(self.shape) > 1 else []
        return flat.reshape((*self.shape[:-2], *down, self.per_row))

    def values(self, blocks: Tensor) -> Tensor:
        """Return the values of blocks in the tensor's shape, without the padding."""
        if self.rows > 1 and self.per_row is not None:
            height, length = self.shape[-2:] if len(self.shape) > 1 else (1, self.shape.numel())
            down, block = -(-height // self.rows), blocks.shape[-1] // self.rows
            # (matrices, down, per_row, rows, block) → (matrices, down · rows, per_row · block): the inverse of ``of``.
            tiles = blocks.reshape(self.shape[:-2].numel(), down, self.per_row, self.rows, block).transpose(2, 3)
            matrices = tiles.reshape(len(tiles), down * self.rows, self.per_row * block)
            return matrices[:, :height, :length].reshape(self.shape)
        if self.per_row is None or blocks.numel() == self.shape.numel():
            return blocks.reshape(self.shape)
        rows = blocks.reshape(*self.shape[:-1], self.per_row * blocks.shape[-1])
        return rows[..., : self.shape[-1] if self.shape else 1].reshape(self.shape)


@dataclass(frozen=True)
class Scaling:
    """Settings that determine scales from magnitudes, with classes instead of names."""

    rule: type[ScalingRule]
    number_format: type[FloatFormat]
    q_scalar: float
    block: int | None  # number of values that share a scale; ``None``: the whole tensor
    powers_of_two: bool = False  # whether scales are rounded up to powers of two, for E8M0


def largest_per_block(blocks: Tensor) -> Tensor:
    """Return the largest finite magnitude of each block (n, b), or of all values (n); 0 if none is finite."""
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
    """Return the largest magnitude of earlier tensors; without earlier tensors, that of the tensor itself."""
    earlier_maximum = earlier.max().to(largest)
    return torch.where(earlier_maximum > 0, earlier_maximum, largest)


def scales_of(blocks: Tensor, scaling: Scaling) -> Tensor:
    """Return the scales (n) of blocks (n, b), or the common scale of values (n)."""
    return scales_for(largest_per_block(blocks), scaling)


def scale_and_cast(blocks: Tensor, draws: Tensor | None, scaling: Scaling, rounding: str) -> Tensor:
    """Return blocks (n, b), or values (n), cast with the scales of their largest magnitudes."""
    return cast(blocks, _materialised(scales_of(blocks, scaling)), draws, scaling.number_format, rounding)


def _materialised(tensor: Tensor) -> Tensor:
    """Make the compiler store a tensor; by default it would recompute it for every use."""
    # torch's inductor stores the input of ``as_strided`` in a buffer.
    return tensor.as_strided(tensor.shape, tensor.stride()) if torch.compiler.is_compiling() else tensor


def cast(
    blocks: Tensor, scales: Tensor, draws: Tensor | None, number_format: type[FloatFormat], rounding: str
) -> Tensor:
    """Return blocks (n, b) cast with scales (n), or values (n) cast with one scale.

    ``draws``, of the shape of ``blocks``, determine the direction of stochastic rounding.
    """
    # scale · q(x / scale); a scale of 0 turns all values into 0
    expanded = scales.unsqueeze(-1) if blocks.ndim > 1 else scales
    scaled = computable(blocks) / torch.where(expanded > 0, expanded, 1.0)
    rounded = _round(scaled, draws, number_format, rounding)
    return saturated(rounded * expanded, blocks.dtype).to(blocks.dtype)


def _round(scaled: Tensor, draws: Tensor | None, number_format: type[FloatFormat], rounding: str) -> Tensor:
    if rounding == "soft":
        return to_continued_grid(saturated(scaled, scaled.dtype), number_format)
    return to_grid(scaled, number_format, torch.round if draws is None else by_draws(draws))


def computable(values: Tensor) -> Tensor:
    """Return the tensor in the dtype of the computation: float32, or float64 for float64."""
    return values if values.dtype in (torch.float32, torch.float64) else values.float()


def saturated(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the values, clamped to the finite numbers of a dtype; NaN stays NaN."""
    return clamped_to(values, torch.finfo(dtype).max)


def as_float32(largest: Tensor) -> Tensor:
    """Round magnitudes up to float32, at most to its largest number; narrower dtypes convert exactly."""
    if largest.dtype != torch.float64:
        return largest.float()
    nearest = largest.float()
    is_short = nearest.double() < largest
    upper = torch.where(is_short, torch.nextafter(nearest, torch.full_like(nearest, torch.inf)), nearest)
    return upper.clamp_max(FLOAT32_MAX)


def cast_and_count(
    chunks: Tensor, zeros: Tensor, scale: Tensor | None, draws: Tensor | None, scaling: Scaling, rounding: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the result of :func:`scale_and_cast`, with sums and maxima of :mod:`.counts`; 0 for the total.

    Uses one loop with few operations per element, so the results are correct only if :func:`counts_are_exact` accepts
    them. Whole numbers are exact. Real numbers are summed in float32 within a chunk and in float64 over the chunks, and
    good to six digits.

    Args:
        chunks: (n, g, b), n · g blocks; at most ``LONGEST`` values per chunk.
        zeros: (n, g, 1), from :func:`negative_zeros_for`. Adding them gives the result chunks and blocks as dimensions;
            without that, the compiler would create several loops.
        scale: the common scale, if it does not depend on the tensor.
        draws: random numbers in the shape of ``chunks``, for stochastic rounding.
        scaling: the settings of the scales, and the format.
        rounding: the rounding of scaled values.
    """
    largest = largest_per_block(chunks)
    largest = largest.amax() if scaling.block is None else largest
    scales = scales_for(largest, scaling) if scale is None else scale
    divisors = torch.where(scales > 0, scales, torch.inf)  # values with a scale of 0 become 0, which is underflow
    maximum = scaling.number_format.maximum
    limits, halves = limits_for(scales, maximum), limits_for(scales, maximum / 2)
    excess_max = torch.where(largest > limits, largest / divisors, 0.0).amax().double() / maximum
    # Stored, since the compiler would otherwise recompute each of them for every value.
    stored = [
        _materialised(factors).expand(chunks.shape[:2]).unsqueeze(-1) for factors in (scales, divisors, limits, halves)
    ]
    expanded, divisor, limit, half = stored
    values = chunks.float() + zeros
    scaled = values / divisor
    rounded = (_round(scaled, draws, scaling.number_format, rounding) * expanded).to(chunks.dtype)
    error, magnitude = rounded.float() - values, values.abs()
    under = (rounded == 0) & (magnitude > 0)
    # One float32 sum counts two flags: FIELD · (upper half) + 1 · (underflow), both at most LONGEST.
    flags = _chunk_sums(torch.where(magnitude > half, FIELD, 0.0) + torch.where(under, 1.0, 0.0))
    upper = (flags / FIELD).floor()
    over = excess = flags.new_zeros(())
    # In all other cases the scales come from the tensor's largest magnitudes, so no value exceeds the range.
    if scaling.q_scalar < 1 or scaling.rule.overflows:
        over = _chunk_sums(torch.where(magnitude > limit, 1.0, 0.0)).sum()
        # Σ |x|/limit over the overflowing values = their number + Σ (|x/scale| − maximum)/maximum
        excess = over + _chunk_sums((scaled - clamped_to(scaled, maximum)).abs()).sum() / maximum
    sums = (
        torch.ones_like(over),
        (over > 0).double(),
        torch.zeros_like(over),
        over,
        (flags - upper * FIELD).sum(),
        torch.zeros_like(over),
        upper.sum(),
        excess,
        _chunk_sums(error.square()).sum(),
        _chunk_sums(values.square()).sum(),
    )
    return rounded, torch.stack(sums), torch.stack([excess_max, scales.amax().double(), 1 / divisors.amin().double()])


def negative_zeros_for(chunks: Tensor) -> Tensor:
    """Return (n, g, 1) values of -0, which change no number when added.

    Their strides of one along both n and g prevent the compiler from merging n and g, or g and b, to one dimension.
    """
    count, group = chunks.shape[:2]
    return chunks.new_full([count + group - 1], -0.0, dtype=torch.float32).unfold(0, group, 1).unsqueeze(-1)


def limits_for(scales: Tensor, maximum: float) -> Tensor:
    """Return scale · maximum, rounded down to float32; inf for a scale of 0.

    A float32 number exceeds the exact product if and only if it exceeds the rounded one.
    """
    exact = scales.double() * maximum
    nearest = exact.float()
    # The bits of a positive float less 1 are those of the next smaller float.
    lower = torch.where(nearest.double() > exact, (nearest.view(torch.int32) - 1).view(torch.float32), nearest)
    return torch.where(scales > 0, lower, torch.inf)


def _chunk_sums(numbers: Tensor) -> Tensor:
    return numbers.sum((1, 2)).double()


def counts_are_exact(sums: Tensor, maxima: Tensor, elements: int) -> bool:
    """Return whether the counts of :func:`cast_and_count` are correct.

    All values and results must be finite, squares must not underflow, and scales must not be extreme. A rule without
    ``overflows`` must not have overflowed. Squares below 2^-126, the smallest normal number, are inexact; this has no
    visible effect if the mean squared error is at least 2^20 times larger.
    """
    by_name = dict(zip((*SUMS, *MAXIMA), [*sums.tolist(), *maxima.tolist()], strict=True))
    return (
        all(map(math.isfinite, by_name.values()))
        and (by_name["total_overflow_elements"] > 0) == (by_name["excess_max"] > 0)
        # A mean squared error of at least 2^20 · 2^-126.
        and by_name["squared_error"] >= elements * 2.0**-106
        and max(by_name["scale_max"], by_name["inverse_scale_max"]) <= 2.0**100
    )
