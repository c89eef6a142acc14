"""Whether a value is unusual among others: outcomes, trends, medians, spreads and ranks."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..student_t import critical_t

Numbers = NDArray[np.float64]
LEVEL = 0.05
"""Largest p-value, a rank among other values, at which a value is unusually high."""
HARMFUL_SPREADS = 3.0
"""A value this many spreads above the usual median is harmful."""
RECENT = 32
"""Number of earlier steps that a step is compared with, without their linear trend."""
ORDINARY_CONFIDENCE = 0.99
"""Confidence of the interval around ordinary rises, which are skewed to the right in most trainings."""


def without_trend(values: Numbers) -> Numbers:
    """Return series of n values as they would be around the level of the next value, shape (…, n).

    The slope b is that of Tukey's resistant line: the difference of the medians of the last and the first third over
    their distance. The result is xᵢ + b·(n − i), i from 0. Values that are not finite stay, and do not count;
    without a majority of finite ones in both thirds there is no slope.
    """
    count = values.shape[-1]
    third = count // 3
    if third < 3:
        return values
    finite = np.where(np.isfinite(values), values, np.nan)
    with np.errstate(invalid="ignore"):
        slope = (_median(finite[..., -third:]) - _median(finite[..., :third])) / (count - third)
    slope = np.nan_to_num(slope, nan=0.0)
    continued: Numbers = values + slope[..., None] * (count - np.arange(count))
    return continued


def _median(values: Numbers) -> Numbers:
    """Return the median of the last dimension without NaN; NaN if half of the values are NaN, or more."""
    few = 2 * np.isnan(values).sum(-1) >= values.shape[-1]
    medians = np.nanmedian(np.where(few[..., None], 0.0, values), -1)
    return np.where(few, np.nan, medians)


def outcomes(values: float | Sequence[float] | Numbers) -> Numbers:
    """Return values with ∞ for each that is not finite: NaN, ∞ and −∞ are one outcome, the worst."""
    numbers = np.atleast_1d(np.asarray(values, dtype=np.float64))
    return np.where(np.isfinite(numbers), numbers, np.inf)


def median_outcome(values: float | Sequence[float] | Numbers) -> float:
    """Return the median, ∞ if at least half of the values are not finite."""
    numbers = np.sort(outcomes(values))
    low, high = numbers[(len(numbers) - 1) // 2], numbers[len(numbers) // 2]
    return float(low if low == high else (low + high) / 2)


def usual_norm(norms: Sequence[float] | Numbers) -> float:
    """Return the median of the finite gradient norms; 0 without any."""
    finite = np.asarray(norms, dtype=np.float64)
    finite = finite[np.isfinite(finite)]
    return float(np.median(finite)) if len(finite) else 0.0


def median_and_spread(values: Numbers) -> tuple[Numbers, Numbers]:
    """Return the medians of the finite values along the last axis, and 1.4826 times their median distances from them.

    Without a finite value they are ∞ and 0.
    """
    if not values.shape[-1]:
        return np.array(np.inf), np.array(0.0)
    finite = np.where(np.isfinite(values), values, np.nan)
    empty = np.isnan(finite).all(-1)
    finite[empty] = 0.0
    middle = np.nanmedian(finite, -1)
    # 1.4826 times the median absolute deviation is the standard deviation of a normal distribution.
    spread = 1.4826 * np.nanmedian(np.abs(finite - middle[..., None]), -1)
    return np.where(empty, np.inf, middle), spread


def chance_of(value: float, others: Numbers) -> float:
    """Return the p-value of a value by its rank: (1 + others at least as high)/(others + 1)."""
    return (1 + int((others >= value).sum())) / (len(others) + 1)


def is_beyond(value: float | Sequence[float], usual: Sequence[float] | Numbers) -> bool:
    """Return whether a value is above the usual ones by rank and by ``HARMFUL_SPREADS``, or not finite unlike them."""
    value, others = median_outcome(value), outcomes(usual)
    middle, spread = median_and_spread(np.asarray(usual, dtype=np.float64))
    return chance_of(value, others) <= LEVEL and bool(value > middle + HARMFUL_SPREADS * spread)


def exceeds_few(value: float, ordinary: Numbers) -> bool:
    """Return whether a value is above all of a few ordinary ones, and above the 99 % interval of one more of them."""
    count = len(ordinary)
    if count < 2:
        return False
    # The rank keeps the level for skewed losses, the interval for few values, which reach no rank.
    half = critical_t(count - 1, ORDINARY_CONFIDENCE) * float(ordinary.std(ddof=1)) * math.sqrt(1 + 1 / count)
    return value > max(float(ordinary.max()), float(ordinary.mean()) + half)


def recent(values: Sequence[float]) -> Numbers:
    """Return the newest values without their trend, as they would be around the level of the next step."""
    return without_trend(np.array(values[-RECENT:], dtype=np.float64))
