"""Losses of casts, counted without creating the cast tensors, in pieces that fit in the cache."""

import math
from collections.abc import Iterable, Iterator, Sequence

import torch
from loopscope.lowbit.casts import Cast, Counts, FloatFormat, Layout, as_float32, delayed, limits_for, scales_for
from torch import Tensor

PIECE = 2**20
"""Number of values in a piece: few enough for the cache, enough that call overhead is small."""
PIECEWISE = (torch.float32, torch.bfloat16, torch.float16)
FLAT = 32
"""Row length if no cast needs blocks."""
EXPONENT = 0x7F800000
"""Mask of the exponent bits of a float32 number."""


def losses(
    tensors: Sequence[Tensor], casts: Sequence[Cast], earlier: Sequence[Tensor | None] | None = None
) -> list[list[Counts]]:
    """Return the losses of each cast for each tensor: the counts of :meth:`Cast.with_counts`, several times faster.

    Integers and maxima are identical; sums of real numbers agree to five digits. Uses ``with_counts`` itself on an
    accelerator, in float64, for roundings other than to nearest, and for blocks of whole rows or of several rows.

    Args:
        tensors: real, of any shapes.
        casts: each is counted for each tensor.
        earlier: for each tensor its earlier largest magnitudes, for rules with a history.
    """
    is_fast = [cast.rounding == "nearest" and cast.rows == 1 and (cast.blocks() or 1) <= PIECE for cast in casts]
    if tensors and len(set(is_fast)) == 2:
        by_kind = {
            kind: [cast for cast, other in zip(casts, is_fast, strict=True) if other == kind] for kind in is_fast
        }
        by_cast = {kind: iter(zip(*losses(tensors, group, earlier), strict=True)) for kind, group in by_kind.items()}
        return [list(row) for row in zip(*(next(by_cast[kind]) for kind in is_fast), strict=True)]
    histories = [None] * len(tensors) if earlier is None else list(earlier)
    results: list[list[Counts]] = [[] for _ in tensors]
    scratch = _Scratch()
    indices_by_kind: dict[tuple[torch.dtype, bool], list[int]] = {}
    width = math.lcm(*(cast.blocks() or 1 for cast in casts))
    piecewise = all(is_fast) and width <= PIECE
    for index, tensor in enumerate(tensors):
        plain = type(tensor) is Tensor and tensor.device.type == "cpu" and tensor.dtype in PIECEWISE
        if piecewise and plain and tensor.numel():
            indices_by_kind.setdefault((tensor.dtype, _row_length(tensor) % width == 0), []).append(index)
        else:
            results[index] = [cast.with_counts(tensor, earlier=histories[index])[1] for cast in casts]
    for (_, is_aligned), indices in indices_by_kind.items():
        for bundle in [casts] if is_aligned else [[cast] for cast in casts]:
            for members in _groups(tensors, indices, bundle):
                group = _Group([tensors[index] for index in members], bundle, scratch)
                losses_by_tensor = group.count_losses([histories[index] for index in members])
                for index, counts in zip(members, losses_by_tensor, strict=True):
                    results[index] += counts
    return results


def _row_length(tensor: Tensor) -> int:
    return tensor.shape[-1] if tensor.ndim else 1


def _groups(tensors: Sequence[Tensor], indices: Iterable[int], casts: Sequence[Cast]) -> Iterator[list[int]]:
    """Yield groups of tensors that fit in one piece together; a larger tensor is a group by itself."""
    width = math.lcm(*(cast.blocks() or FLAT for cast in casts))
    size, group = 0, list[int]()
    for index in indices:
        row = _row_length(tensors[index])
        padded = tensors[index].numel() // row * (row + -row % width) + width
        if group and size + padded > PIECE:
            yield group
            size, group = 0, []
        size += padded
        group.append(index)
    yield group


class _Scratch:
    """Buffers for the intermediate results of a piece, reused so that they stay in the cache."""

    def __init__(self) -> None:
        self._buffers: list[Tensor] = []

    def magnitudes(self, piece: Tensor) -> Tensor:
        """Return the magnitudes of a piece in float32, in the first buffer; 0 for values that are not finite."""
        buffer = self.like(piece, 0)
        buffer.copy_(piece)
        return torch.abs(torch.nan_to_num(buffer, 0.0, 0.0, 0.0, out=buffer), out=buffer)

    def like(self, piece: Tensor, number: int) -> Tensor:
        """Return a buffer in the shape of a piece."""
        self._buffers = self._buffers or [torch.empty(PIECE) for _ in range(3)]
        return self._buffers[number][: piece.numel()].view(piece.shape)


class _Group:
    """Tensors of one dtype, stacked as rows whose length is a multiple of all casts' blocks.

    A group has either one piece of several tensors, or one tensor of several pieces. A column has a number per row.
    """

    def __init__(self, tensors: list[Tensor], casts: Sequence[Cast], scratch: _Scratch) -> None:
        self.casts, self.scratch, self.dtype = casts, scratch, tensors[0].dtype
        widths = {width for cast in casts if (width := cast.blocks())}
        self.width, self._smallest = math.lcm(*widths or {FLAT}), math.gcd(*widths or {FLAT})
        layouts = [Layout.of(tensor if widths else tensor.reshape(-1), self.width).blocks for tensor in tensors]
        self.rows = layouts[0] if len(layouts) == 1 else torch.cat(layouts)
        self.row_counts = [len(layout) for layout in layouts]
        self.sizes = torch.tensor([tensor.numel() for tensor in tensors], dtype=torch.float64)
        self._length = max(1, PIECE // self.width)
        pieces = torch.split(self.rows, self._length)
        self._largest = torch.cat([scratch.magnitudes(piece).view(-1, self._smallest).amax(1) for piece in pieces])
        self.largest = torch.stack([part.amax() for part in self.largest_in(self._smallest)])

    def largest_in(self, block: int) -> Sequence[Tensor]:
        """Return for each tensor the largest magnitudes of its blocks."""
        maxima = self._largest.view(-1, block // self._smallest)
        return torch.split_with_sizes(maxima.amax(1), [rows * (self.width // block) for rows in self.row_counts])

    def count_losses(self, earlier: list[Tensor | None]) -> list[list[Counts]]:
        """Return the counts of the casts' losses, a list for each tensor."""
        # A power of two that scales the largest magnitude to about 1, so that squares neither over- nor underflow. The
        # biased exponent of a float32 is in bits 23 to 30; 254 − e is the exponent of the reciprocal.
        exponent = (as_float32(self.largest).view(torch.int32) >> 23).clamp(27, 227)
        unit = ((254 - exponent) << 23).view(torch.float32)
        scales = [self._scales(cast, earlier) for cast in self.casts]
        columns = [_column(numbers, self._lengths(cast)) for cast, numbers in zip(self.casts, scales, strict=True)]
        maxima = [cast.number_format.maximum for cast in self.casts]
        limits = [limits_for(column, largest) for column, largest in zip(columns, maxima, strict=True)]
        halves = [limits_for(column, largest * 0.5) for column, largest in zip(columns, maxima, strict=True)]
        sums: list[list[Tensor]] = [[] for _ in [None, *self.casts]]
        for begin in range(0, len(self.rows), self._length):
            part = self.rows[begin : begin + self._length]
            lengths = [rows * self.width for rows in self.row_counts] if len(self.sizes) > 1 else [part.numel()]
            units = unit if len(unit) == 1 else _column(list(torch.split(unit, 1)), self.row_counts).unsqueeze(1)
            magnitude = self.scratch.magnitudes(part)
            sums[0].append(self._sums(part, magnitude, units, lengths))
            for number, cast in enumerate(self.casts):
                rows = magnitude.view(-1, cast.blocks() or self.width)
                piece = slice(begin * self.width // rows.shape[1], (begin + len(part)) * self.width // rows.shape[1])
                bounds = [values[number][piece].unsqueeze(1) for values in (columns, limits, halves)]
                sums[1 + number].append(self._cast_sums(rows, bounds, units, lengths, cast.number_format))
        tensor_sums = torch.stack(sums[0]).double().sum(0)
        pairs = zip(sums[1:], scales, strict=True)
        by_cast = [self._counts(tensor_sums, torch.stack(pieces), unit, scale) for pieces, scale in pairs]
        return [list(counts) for counts in zip(*by_cast, strict=True)]

    def _lengths(self, cast: Cast) -> list[int]:
        return [rows * (self.width // (cast.blocks() or self.width)) for rows in self.row_counts]

    def _scales(self, cast: Cast, earlier: list[Tensor | None]) -> list[Tensor]:
        """Return each tensor's scales: one per block, or a single one."""
        scaling, block = cast.scaling, cast.blocks()
        if block:
            return [scales_for(largest, scaling) for largest in self.largest_in(block)]
        largest = list(self.largest)
        if cast.scaling_rule.history:
            pairs = zip(largest, earlier, strict=True)
            largest = [
                value if history is None else delayed(value, cast.relevant_history(history)) for value, history in pairs
            ]
        return [scales_for(value, scaling).reshape(1) for value in largest]

    def _sums(self, part: Tensor, magnitude: Tensor, units: Tensor, lengths: list[int]) -> Tensor:
        """Return the sums that no cast changes, (3, tensors): non-finite values, values ≠ 0, squared norm."""
        two = self.scratch.like(part, 1)
        above_zero = _sums_of(torch.sign(magnitude, out=two), lengths)
        norms = [torch.dot(values, values) for values in _parts(torch.mul(magnitude, units, out=two), lengths)]
        zeros = two.copy_(part).mul_(0.0)  # NaN where the value is not finite
        non_finite = _sums_of(torch.nan_to_num(zeros, 1.0, out=two), lengths)
        return torch.stack([*non_finite, *above_zero, *norms]).view(3, -1)

    def _cast_sums(
        self,
        magnitude: Tensor,
        bounds: list[Tensor],
        units: Tensor,
        lengths: list[int],
        number_format: type[FloatFormat],
    ) -> Tensor:
        """Return the sums of a cast in a piece, (6, tensors).

        They are: elements that overflow; minus the elements in the upper half; elements not rounded to 0; sum of
        (excess − 1) and its maximum; squared error. Flags are signs of differences, summed: exact, and several times
        faster than comparisons.
        """
        two, three = self.scratch.like(magnitude, 1), self.scratch.like(magnitude, 2)
        scale, limit, half = bounds
        overflowing = _sums_of(torch.sub(magnitude, limit, out=two).sign_().relu_(), lengths)
        upper_half = _sums_of(torch.sub(half, magnitude, out=two).sign_().clamp_max_(0.0), lengths)
        maximum = number_format.maximum
        scaled = torch.div(magnitude, torch.where(scale > 0, scale, torch.inf), out=two)
        excess = torch.sub(scaled, maximum, out=three).relu_()
        excesses, worst = _sums_of(excess, lengths), [values.amax() for values in _parts(excess, lengths)]
        # Round to the format's numbers in place, with the operations of the cast itself:
        # spacing = max(2^⌊log₂ x⌋, smallest normal)·2^−mantissa_bits, rounded = round(x / spacing)·spacing.
        torch.bitwise_and(scaled.clamp_max_(maximum).view(torch.int32), EXPONENT, out=three.view(torch.int32))
        spacing = three.clamp_min_(number_format.smallest_normal()).mul_(2.0**-number_format.mantissa_bits)
        rounded = scaled.div_(spacing).round_().mul_(spacing).mul_(scale)
        rounded.clamp_max_(torch.finfo(self.dtype).max)
        if self.dtype != torch.float32:
            rounded.copy_(rounded.to(self.dtype))
        kept = _sums_of(torch.sign(rounded, out=three), lengths)
        error = rounded.sub_(magnitude).view(-1, self.width).mul_(units)
        errors = [torch.dot(values, values) for values in _parts(error, lengths)]
        sums = torch.stack([*overflowing, *upper_half, *kept, *excesses, *worst, *errors]).view(6, -1)
        sums[3:5] /= maximum
        return sums

    def _counts(self, tensor_sums: Tensor, pieces: Tensor, unit: Tensor, scales: list[Tensor]) -> list[Counts]:
        """Combine the sums (pieces, 6, tensors) of a cast into counts for each tensor."""
        non_finite, above_zero, squared_norm = tensor_sums
        overflowing, upper_half, kept, excess, _, error = pieces.double().sum(0)
        square, overflows = unit.double() ** 2, overflowing > 0
        # The pieces have the excess (|x| − s·M)/(s·M), so adding 1 for each overflowing element gives |x|/(s·M).
        worst = torch.where(overflows, pieces[:, 4].amax(0).double() + 1, 0.0)
        # Errors and norms are those of values multiplied by ``unit``; dividing by unit² undoes that.
        sums = (
            *(torch.ones_like(square), overflows.double(), self.sizes, overflowing, above_zero - kept, non_finite),
            *(-upper_half, excess + overflowing, error / square, squared_norm / square),
        )
        largest = torch.stack([scale.amax() for scale in scales]).double()
        smallest = torch.stack([torch.where(scale > 0, scale, torch.inf).amin() for scale in scales]).double()
        maxima = torch.stack([worst, largest, 1 / smallest], 1)
        return [Counts(*pair) for pair in zip(torch.stack(sums, 1), maxima, strict=True)]


def _column(numbers: list[Tensor], lengths: list[int]) -> Tensor:
    """Return one number per row, from each tensor's numbers: one per row, or a single one for all its rows."""
    return torch.cat([values.expand(length) for values, length in zip(numbers, lengths, strict=True)])


def _parts(values: Tensor, lengths: list[int]) -> Sequence[Tensor]:
    return torch.split_with_sizes(values.view(-1), lengths)


def _sums_of(values: Tensor, lengths: list[int]) -> list[Tensor]:
    return [part.sum() for part in _parts(values, lengths)]
