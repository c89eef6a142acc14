"""Removal of the linear trend from the values before a step, so that a falling loss does not hide an early spike."""

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]


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
