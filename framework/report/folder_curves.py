"""Curves of many runs: each in a few hundred bins of steps, and the band of several over these bins."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .curves import MetricCurve

MOST_BINS = 200
LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class BinnedCurve:
    """A curve in bins of 2^shift steps, so that the bins of any two curves can be joined.

    Args:
        shift: the binary logarithm of the width of a bin.
        steps: the last step of each bin with a point: shape (bins,).
        values: the last value of each bin, and its smallest and largest finite value: shape (3, bins).
    """

    shift: int
    steps: NDArray[np.int64]
    values: NDArray[np.float32]

    @classmethod
    def of(cls, curve: MetricCurve) -> "BinnedCurve":
        """Return the bins of a curve.

        >>> BinnedCurve.of(MetricCurve.of_points(range(400), range(400))).values[:, -1].tolist()
        [399.0, 398.0, 399.0]
        """
        steps = curve.steps.astype(np.int64)
        clipped = np.clip(curve.values, -LARGEST, LARGEST)
        values = np.where(curve.finite, clipped, np.nan).astype(np.float32)
        shift = 0
        while len(steps) and int(steps[-1]) >> shift >= MOST_BINS:
            shift += 1
        return cls(0, steps, np.stack([values, values, values])).widened(shift)

    def widened(self, shift: int) -> "BinnedCurve":
        """Return the curve in wider bins."""
        if shift == self.shift or not len(self.steps):
            return BinnedCurve(shift, self.steps, self.values)
        begins = np.flatnonzero(np.diff(self.steps >> shift, prepend=-1))
        ends = np.append(begins[1:], len(self.steps)) - 1
        last, low, high = self.values
        joined = [last[ends], np.fmin.reduceat(low, begins), np.fmax.reduceat(high, begins)]
        return BinnedCurve(shift, self.steps[ends], np.stack(joined))

    def as_bytes(self) -> bytes:
        """Return the curve for :meth:`of_bytes`."""
        head = np.array([self.shift], dtype="<i8")
        return head.tobytes() + self.steps.astype("<i8").tobytes() + self.values.astype("<f4").tobytes()

    @classmethod
    def of_bytes(cls, content: bytes) -> "BinnedCurve":
        """Read what :meth:`as_bytes` has written; raises ``ValueError`` for other content."""
        bins, rest = divmod(len(content) - 8, 8 + 3 * 4)
        if bins < 0 or rest:
            raise ValueError("not a curve")
        shift, *steps = np.frombuffer(content, "<i8", bins + 1).tolist()
        values = np.frombuffer(content, "<f4", 3 * bins, 8 * (bins + 1)).reshape(3, bins)
        if not 0 <= shift < 64 or steps != sorted(steps) or min(steps, default=0) < 0:
            raise ValueError("not a curve")
        return cls(shift, np.array(steps, dtype=np.int64), values)


@dataclass(frozen=True)
class Band:
    """The median of several curves, and their lowest and highest values: each of shape (bins,)."""

    steps: Sequence[int]
    values: NDArray[np.float64]
    """The median of the finite values; NaN where more than half of the curves have none."""
    low: NDArray[np.float64]
    high: NDArray[np.float64]

    @classmethod
    def over(cls, curves: Sequence[BinnedCurve]) -> "Band":
        """Return the band of curves, at the bins in which at least half of them have a point.

        >>> curves = [MetricCurve.of_points([1, 2], [height, 3 * height]) for height in (1.0, 2.0, 4.0)]
        >>> band = Band.over([*map(BinnedCurve.of, curves)])
        >>> band.steps, band.values.tolist(), band.low.tolist(), band.high.tolist()
        ([1, 2], [2.0, 6.0], [1.0, 3.0], [4.0, 12.0])
        """
        shift = max(curve.shift for curve in curves)
        widened = [curve.widened(shift) for curve in curves]
        bins, counts = np.unique(np.concatenate([curve.steps >> shift for curve in widened]), return_counts=True)
        bins = bins[2 * counts >= len(curves)]
        steps = np.zeros(len(bins), dtype=np.int64)
        values = np.full((len(curves), 3, len(bins)), np.nan)
        for row, curve in zip(values, widened, strict=True):
            own = curve.steps >> shift
            kept = np.isin(own, bins)
            places = np.searchsorted(bins, own[kept])
            row[:, places] = curve.values[:, kept]
            steps[places] = np.maximum(steps[places], curve.steps[kept])
        last, low, high = values[:, 0], values[:, 1], values[:, 2]
        few = 2 * np.isfinite(last).sum(axis=0) < len(curves)
        return cls(
            steps.tolist(),
            np.where(few, np.nan, _median(last)),
            np.fmin.reduce(low, axis=0),
            np.fmax.reduce(high, axis=0),
        )


def _median(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the median of the finite values of each column; NaN for none, without a warning."""
    ordered = np.sort(values, axis=0)  # NaN last
    counts = np.isfinite(ordered).sum(axis=0)
    columns = np.arange(values.shape[1])
    middle: Any = (ordered[np.maximum(counts - 1, 0) // 2, columns], ordered[counts // 2, columns])
    return np.where(counts > 0, (middle[0] + middle[1]) / 2, np.nan)
