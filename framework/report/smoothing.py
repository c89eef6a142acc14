"""Running means of curves, of which non-finite values are no part."""

import numpy as np

from .curves import Curve, Floats


def running_mean(curve: Curve, window: int, *, geometric: bool = False) -> Curve:
    """Return the mean of the ``window`` values around each point: of those there are, at the ends and in gaps.

    An odd window lies evenly around its point, an even one has one value more before it. Where the value is not
    finite, there is no mean either. A geometric mean, which lies in the middle of a curve on a logarithmic axis, is
    of the values above 0.

    >>> running_mean(Curve.of_points([1, 2, 3, 4], [1.0, 3.0, float("nan"), 5.0]), 3).values
    array([ 2.,  2., nan,  5.])
    """
    shown = curve.finite & (curve.values > 0) if geometric else curve.finite
    values = np.log(curve.values, where=shown, out=np.zeros_like(curve.values)) if geometric else curve.values
    window = min(window, 2 * len(shown) + 1)
    sums = window_sums(np.where(shown, values, 0.0), window)
    counts = window_sums(shown.astype(np.float64), window)
    means = np.full_like(sums, np.nan)
    np.divide(sums, counts, out=means, where=curve.finite & (counts > 0))
    return Curve(curve.steps, np.exp(means) if geometric else means)


def window_sums(values: Floats, window: int) -> Floats:
    """Return the sum of the ``window`` values around each one.

    Sums run from both ends of blocks as long as the window, each window being the end of a block and the beginning of
    the next: the time does not depend on the window, and nothing is subtracted, so that a spike leaves no rounding
    error behind (van Herk, Pattern Recognition Letters 13, 1992, does this for maxima).
    """
    before = window // 2
    length = len(values) + window - 1
    padded = np.zeros(-(-length // window) * window)
    padded[before : before + len(values)] = values
    blocks = padded.reshape(-1, window)
    from_left = blocks.cumsum(axis=1).ravel()
    from_right = blocks[:, ::-1].cumsum(axis=1)[:, ::-1].ravel()
    first = np.arange(len(values))
    whole_block = first % window == 0
    return from_left[first + window - 1] + np.where(whole_block, 0.0, from_right[first])
