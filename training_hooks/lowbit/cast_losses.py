"""What casts would lose of tensors, counted without making the cast tensors, in pieces that stay in the cache."""

import math
from collections.abc import Iterable, Iterator, Sequence

import torch
from loopscope.lowbit.casts import Cast, Counts, FloatFormat, Layout, as_float32, delayed, limits_for, scales_for
from torch import Tensor

PIECE = 2**20
"""Values of a piece: few enough for the cache, and enough that the calls themselves hardly take time."""
PIECEWISE = (torch.float32, torch.bfloat16, torch.float16)
FLAT = 32
"""Values of a row where no cast asks for blocks."""
EXPONENT = 0x7F800000
"""The bits of the exponent of a float32 number."""


def losses(
    tensors: Sequence[Tensor], casts: Sequence[Cast], earlier: Sequence[Tensor | None] | None = None
) -> list[list[Counts]]:
    """Return for each tensor what each cast would lose of it, as :meth:`Cast.counted` counts it, several times faster.

    Whole numbers and maxima are the same; sums of real numbers are good to five digits. On an accelerator, in float64,
    for other roundings than to nearest and for blocks of whole or of several rows it is ``counted`` itself.

    Args:
        tensors: real, of any shapes.
        casts: what would be done to each of them.
        earlier: for each tensor the largest magnitudes of earlier ones, for rules with a history.
    """
    kinds = [each.rounding == "nearest" and each.rows == 1 and (each.blocks() or 1) <= PIECE for each in casts]
    if tensors and len(set(kinds)) == 2:
        alike = {kind: [cast for cast, other in zip(casts, kinds, strict=True) if other == kind] for kind in kinds}
        by_cast = {kind: iter(zip(*losses(tensors, some, earlier), strict=True)) for kind, some in alike.items()}
        return [list(row) for row in zip(*(next(by_cast[kind]) for kind in kinds), strict=True)]
    past = [None] * len(tensors) if earlier is None else list(earlier)
    found: list[list[Counts]] = [[] for _ in tensors]
    room = _Room()
    together: dict[tuple[torch.dtype, bool], list[int]] = {}
    width = math.lcm(*(cast.blocks() or 1 for cast in casts))
    piecewise = all(kinds) and width <= PIECE
    for index, tensor in enumerate(tensors):
        plain = type(tensor) is Tensor and tensor.device.type == "cpu" and tensor.dtype in PIECEWISE
        if piecewise and plain and tensor.numel():
            together.setdefault((tensor.dtype, _row(tensor) % width == 0), []).append(index)
        else:
            found[index] = [cast.counted(tensor, earlier=past[index])[1] for cast in casts]
    for (_, is_aligned), indices in together.items():
        for bundle in [casts] if is_aligned else [[cast] for cast in casts]:
            for members in _groups(tensors, indices, bundle):
                group = _Group([tensors[index] for index in members], bundle, room)
                for index, counts in zip(members, group.lost([past[index] for index in members]), strict=True):
                    found[index] += counts
    return found


def _row(tensor: Tensor) -> int:
    return tensor.shape[-1] if tensor.ndim else 1


def _groups(tensors: Sequence[Tensor], indices: Iterable[int], casts: Sequence[Cast]) -> Iterator[list[int]]:
    """Yield tensors that are looked at together: small enough for one piece; larger ones alone."""
    width = math.lcm(*(cast.blocks() or FLAT for cast in casts))
    size, group = 0, list[int]()
    for index in indices:
        row = _row(tensors[index])
        padded = tensors[index].numel() // row * (row + -row % width) + width
        if group and size + padded > PIECE:
            yield group
            size, group = 0, []
        size += padded
        group.append(index)
    yield group


class _Room:
    """Memory for the intermediate results of a piece, used again and again so that it stays in the cache."""

    def __init__(self) -> None:
        self._buffers: list[Tensor] = []

    def magnitudes(self, piece: Tensor) -> Tensor:
        """Return the magnitudes of a piece in float32, 0 for what is not finite; they lie in the first buffer."""
        found = self.like(piece, 0)
        found.copy_(piece)
        return torch.abs(torch.nan_to_num(found, 0.0, 0.0, 0.0, out=found), out=found)

    def like(self, piece: Tensor, number: int) -> Tensor:
        """Return a buffer in the shape of a piece."""
        self._buffers = self._buffers or [torch.empty(PIECE) for _ in range(3)]
        return self._buffers[number][: piece.numel()].view(piece.shape)


class _Group:
    """Tensors of one type laid out below each other in rows that the blocks of all casts divide.

    Either there are several tensors and one piece, or one tensor. What is called a column has a number for each row.
    """

    def __init__(self, tensors: list[Tensor], casts: Sequence[Cast], room: _Room) -> None:
        self.casts, self.room, self.dtype = casts, room, tensors[0].dtype
        widths = {width for cast in casts if (width := cast.blocks())}
        self.width, self._smallest = math.lcm(*widths or {FLAT}), math.gcd(*widths or {FLAT})
        layouts = [Layout.of(each if widths else each.reshape(-1), self.width).blocks for each in tensors]
        self.rows = layouts[0] if len(layouts) == 1 else torch.cat(layouts)
        self.rows_of_each = [len(each) for each in layouts]
        self.sizes = torch.tensor([each.numel() for each in tensors], dtype=torch.float64)
        self._length = max(1, PIECE // self.width)
        pieces = torch.split(self.rows, self._length)
        self._largest = torch.cat([room.magnitudes(each).view(-1, self._smallest).amax(1) for each in pieces])
        self.largest = torch.stack([part.amax() for part in self.largest_in(self._smallest)])

    def largest_in(self, block: int) -> Sequence[Tensor]:
        """Return for each tensor the largest magnitudes of its blocks."""
        found = self._largest.view(-1, block // self._smallest)
        return torch.split_with_sizes(found.amax(1), [rows * (self.width // block) for rows in self.rows_of_each])

    def lost(self, earlier: list[Tensor | None]) -> list[list[Counts]]:
        """Return what the casts would lose, a list for each tensor."""
        # a power of two that brings the largest magnitude near 1, so that squares neither over- nor underflow
        exponent = (as_float32(self.largest).view(torch.int32) >> 23).clamp(27, 227)
        unit = ((254 - exponent) << 23).view(torch.float32)
        scales = [self._scales(cast, earlier) for cast in self.casts]
        columns = [_column(one, self._lengths(cast)) for cast, one in zip(self.casts, scales, strict=True)]
        maxima = [cast.number_format.maximum for cast in self.casts]
        limits = [limits_for(each, largest) for each, largest in zip(columns, maxima, strict=True)]
        halves = [limits_for(each, largest * 0.5) for each, largest in zip(columns, maxima, strict=True)]
        sums: list[list[Tensor]] = [[] for _ in [None, *self.casts]]
        for begin in range(0, len(self.rows), self._length):
            part = self.rows[begin : begin + self._length]
            lengths = [rows * self.width for rows in self.rows_of_each] if len(self.sizes) > 1 else [part.numel()]
            units = unit if len(unit) == 1 else _column(list(torch.split(unit, 1)), self.rows_of_each).unsqueeze(1)
            magnitude = self.room.magnitudes(part)
            sums[0].append(self._sums(part, magnitude, units, lengths))
            for number, cast in enumerate(self.casts):
                rows = magnitude.view(-1, cast.blocks() or self.width)
                piece = slice(begin * self.width // rows.shape[1], (begin + len(part)) * self.width // rows.shape[1])
                ends = [each[number][piece].unsqueeze(1) for each in (columns, limits, halves)]
                sums[1 + number].append(self._lost(rows, ends, units, lengths, cast.number_format))
        of_all = torch.stack(sums[0]).double().sum(0)
        pairs = zip(sums[1:], scales, strict=True)
        by_cast = [self._counts(of_all, torch.stack(each), unit, scale) for each, scale in pairs]
        return [list(counts) for counts in zip(*by_cast, strict=True)]

    def _lengths(self, cast: Cast) -> list[int]:
        return [rows * (self.width // (cast.blocks() or self.width)) for rows in self.rows_of_each]

    def _scales(self, cast: Cast, earlier: list[Tensor | None]) -> list[Tensor]:
        """Return each tensor's scales: one for each of its blocks, or one."""
        scaling, block = cast.scaling, cast.blocks()
        if block:
            return [scales_for(largest, scaling) for largest in self.largest_in(block)]
        largest = list(self.largest)
        if cast.scaling_rule.history:
            past = zip(largest, earlier, strict=True)
            largest = [one if before is None else delayed(one, cast.past(before)) for one, before in past]
        return [scales_for(one, scaling).reshape(1) for one in largest]

    def _sums(self, part: Tensor, magnitude: Tensor, units: Tensor, lengths: list[int]) -> Tensor:
        """Return what no cast changes, (3, tensors): values that are not finite, those above 0, the squared norm."""
        two = self.room.like(part, 1)
        above_zero = _sums_of(torch.sign(magnitude, out=two), lengths)
        norms = [torch.dot(each, each) for each in _parts(torch.mul(magnitude, units, out=two), lengths)]
        nothing = two.copy_(part).mul_(0.0)  # NaN where the value is not finite
        non_finite = _sums_of(torch.nan_to_num(nothing, 1.0, out=two), lengths)
        return torch.stack([*non_finite, *above_zero, *norms]).view(3, -1)

    def _lost(
        self, magnitude: Tensor, ends: list[Tensor], units: Tensor, lengths: list[int], number_format: type[FloatFormat]
    ) -> Tensor:
        """Return what a cast loses in a piece, (6, tensors).

        Overflowing, not in the upper half and above 0 (negative), not rounded to 0, excess less 1, its largest, error².
        Flags are signs of differences, added up: exact, and several times faster than comparisons.
        """
        two, three = self.room.like(magnitude, 1), self.room.like(magnitude, 2)
        scale, limit, half = ends
        overflowing = _sums_of(torch.sub(magnitude, limit, out=two).sign_().relu_(), lengths)
        upper_half = _sums_of(torch.sub(half, magnitude, out=two).sign_().clamp_max_(0.0), lengths)
        maximum = number_format.maximum
        scaled = torch.div(magnitude, torch.where(scale > 0, scale, torch.inf), out=two)
        excess = torch.sub(scaled, maximum, out=three).relu_()
        excesses, worst = _sums_of(excess, lengths), [each.amax() for each in _parts(excess, lengths)]
        # rounded to the format's numbers in place, with the operations of the cast itself
        torch.bitwise_and(scaled.clamp_max_(maximum).view(torch.int32), EXPONENT, out=three.view(torch.int32))
        spacing = three.clamp_min_(number_format.smallest_normal()).mul_(2.0**-number_format.mantissa_bits)
        rounded = scaled.div_(spacing).round_().mul_(spacing).mul_(scale)
        rounded.clamp_max_(torch.finfo(self.dtype).max)
        if self.dtype != torch.float32:
            rounded.copy_(rounded.to(self.dtype))
        kept = _sums_of(torch.sign(rounded, out=three), lengths)
        error = rounded.sub_(magnitude).view(-1, self.width).mul_(units)
        errors = [torch.dot(each, each) for each in _parts(error, lengths)]
        found = torch.stack([*overflowing, *upper_half, *kept, *excesses, *worst, *errors]).view(6, -1)
        found[3:5] /= maximum
        return found

    def _counts(self, of_all: Tensor, pieces: Tensor, unit: Tensor, scales: list[Tensor]) -> list[Counts]:
        """Put together what a cast loses of each tensor, from sums (pieces, 6, tensors)."""
        non_finite, above_zero, squared_norm = of_all
        overflowing, upper_half, kept, excess, _, error = pieces.double().sum(0)
        square, any_ = unit.double() ** 2, overflowing > 0
        worst = torch.where(any_, pieces[:, 4].amax(0).double() + 1, 0.0)
        sums = (
            *(torch.ones_like(square), any_.double(), self.sizes, overflowing, above_zero - kept, non_finite),
            *(-upper_half, excess + overflowing, error / square, squared_norm / square),
        )
        largest = torch.stack([scale.amax() for scale in scales]).double()
        smallest = torch.stack([torch.where(scale > 0, scale, torch.inf).amin() for scale in scales]).double()
        maxima = torch.stack([worst, largest, 1 / smallest], 1)
        return [Counts(*pair) for pair in zip(torch.stack(sums, 1), maxima, strict=True)]


def _column(numbers: list[Tensor], lengths: list[int]) -> Tensor:
    """Return a number for each row, from those of each tensor's rows or from one for all of them."""
    return torch.cat([one.expand(length) for one, length in zip(numbers, lengths, strict=True)])


def _parts(values: Tensor, lengths: list[int]) -> Sequence[Tensor]:
    return torch.split_with_sizes(values.view(-1), lengths)


def _sums_of(values: Tensor, lengths: list[int]) -> list[Tensor]:
    return [part.sum() for part in _parts(values, lengths)]
