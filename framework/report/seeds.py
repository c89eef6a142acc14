"""Statistics over seeds: the spread of a group of runs with equal settings, and tests between two groups."""

import math
from collections.abc import Mapping, Sequence
from functools import reduce
from operator import itemgetter
from statistics import mean, stdev
from typing import Any

import numpy as np

from ..student_t import critical_t, two_sided_p
from .curves import MetricCurve

Numbers = Mapping[int, float | None]  # by seed; None where a run has no such number
CONTRAST = ("difference", "low", "high", "t", "degrees_of_freedom", "p", "holm", "test", "seeds", "remark")
LARGEST = 1e150  # its square is finite; larger numbers count as non-finite
NO_SPREAD = 1e-12  # relative to the largest value: the rounding error of equal differences


def spread_of(values: Sequence[float | None]) -> dict[str, Any]:
    """Return mean, sample deviation, 95 % t-interval of the mean, and the number of non-finite and missing values.

    The interval assumes normal values. It covers the mean of log-normal ones with σ = 0.5 in 92 %, with σ = 1 in 83 %.
    """
    numbers = list(_finite(dict(enumerate(values))).values())
    size, middle, missing = len(numbers), mean(numbers) if numbers else None, values.count(None)
    deviation = low = high = None
    # Interval: mean ± t(0.975, n − 1) · deviation / √n.
    if middle is not None and size > 1:
        deviation = stdev(numbers)
        half = critical_t(size - 1) * deviation / math.sqrt(size)
        low, high = middle - half, middle + half
    out = {"missing": missing, "not finite": len(values) - size - missing}
    remark = ", ".join(f"{count} {text}" for text, count in out.items() if count)
    return {"count": size, "mean": middle, "deviation": deviation, "low": low, "high": high, "remark": remark}


def _finite(numbers: Numbers) -> dict[int, float]:
    return {seed: value for seed, value in numbers.items() if value is not None and abs(value) <= LARGEST}


def mean_curve(curves: Sequence[MetricCurve]) -> MetricCurve:
    """Return the mean of curves at their common steps, with the half-width of its 95 % t-interval; none for one."""
    # Curves have shape (steps,), stacked values (curves, steps); half = t(0.975, n − 1) · deviation / √n at each step.
    steps = reduce(np.intersect1d, [curve.steps for curve in curves])
    values, count = np.stack([curve.values[np.searchsorted(curve.steps, steps)] for curve in curves]), len(curves)
    with np.errstate(all="ignore"):  # values may be non-finite
        half = critical_t(count - 1) * values.std(axis=0, ddof=1) / math.sqrt(count) if count > 1 else None
        return MetricCurve(steps, values.mean(axis=0), half)


def contrast(a: Numbers, b: Numbers) -> dict[str, Any]:
    """Test whether two groups differ: paired t if all finite numbers have a partner of their seed, else Welch's t.

    The result has a − b with its 95 % interval, the test, p, and the number of used seeds. Pairs alone would discard
    the other runs: of five runs each with two common seeds, 1 degree of freedom would be left of 8.
    """
    mine, theirs = _finite(a), _finite(b)
    sides = [list(mine.values()), list(theirs.values())]
    result: dict[str, Any] = dict.fromkeys(CONTRAST)
    result |= {"test": "Welch t", "seeds": f"{len(mine)} of {len(a)}, {len(theirs)} of {len(b)}", "remark": ""}
    if len(mine) > 1 and mine.keys() == theirs.keys():
        sides = [[mine[seed] - theirs[seed] for seed in sorted(mine)]]
        result |= {"test": "paired t", "seeds": f"{len(mine)} of {len(a.keys() | b.keys())}"}
    if min(map(len, sides)) < 2:
        return result | {"test": None, "remark": "too few seeds"}
    # t = difference / √(Σ sᵢ² / nᵢ), over one side of paired differences, or over both groups.
    difference = mean(sides[0]) - sum(map(mean, sides[1:]))
    squares = [(stdev(side) ** 2 / len(side), len(side) - 1) for side in sides]
    error = math.sqrt(sum(square for square, _ in squares))
    if error <= NO_SPREAD * max(map(abs, (*mine.values(), *theirs.values()))):
        return result | {"test": None, "difference": difference, "remark": "no spread"}
    # Welch-Satterthwaite: freedom = (Σ vᵢ)² / Σ (vᵢ² / (nᵢ − 1)) with vᵢ = sᵢ² / nᵢ, which is n − 1 if paired.
    freedom, t = 1 / sum((square / error**2) ** 2 / df for square, df in squares), difference / error
    half = critical_t(freedom) * error
    result |= {"difference": difference, "low": difference - half, "high": difference + half}
    return result | {"t": t, "degrees_of_freedom": freedom, "p": two_sided_p(t, freedom)}


def no_contrast(remark: str) -> dict[str, Any]:
    """Return the result for groups that are not tested, with the reason."""
    return {**dict.fromkeys(CONTRAST), "remark": remark}


def correct(contrasts: Sequence[dict[str, Any]]) -> None:
    """Set ``holm`` in each tested contrast: p after Holm's step-down correction for the number of tests."""
    tested = sorted((test for test in contrasts if test["p"] is not None), key=itemgetter("p"))
    # Holm: the k-th smallest of m p values becomes max over j ≤ k of min(1, (m − j + 1) · p_j).
    largest = 0.0
    for rank, test in enumerate(tested):
        test["holm"] = largest = max(largest, min(1.0, test["p"] * (len(tested) - rank)))
