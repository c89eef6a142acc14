"""Differences of pairs, judged after each pair: an interval that holds at every look, and what it decides."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Literal

Answer = Literal["better", "worse", "equal", "undecided"]
SPREAD = 4.0
"""The variance of the mixture over the true mean, in variances of a difference; 12 pairs have 1.7 times the interval of
one look then, and 4 pairs are the fewest that decide at 5 %."""
MOST_PAIRS = 100_000


@dataclass(frozen=True)
class Judgement:
    """What some pairs say about B in place of A."""

    answer: Answer
    mean: float
    """The mean difference B − A."""
    low: float
    high: float
    needed: int | None
    """About how many pairs decide, if the mean and the spread stay; ``None`` if more than :data:`MOST_PAIRS`."""


def interval_half_width(pairs: int, deviation: float, alpha: float) -> float:
    """Return the half-width of an interval for the mean that holds at all numbers of pairs together.

    The interval contains the means that a mixture of t-tests does not reject: the likelihood ratio of the t-statistic,
    with the standardized mean drawn from N(0, :data:`SPREAD`), against mean 0. It is a martingale under every normal
    distribution with that mean, so it reaches 1/α with a probability of at most α at any look (Ville's inequality).
    Infinite for too few pairs.

    Sources:
        Lai, "On confidence sequences", Annals of Statistics 4 (1976) 265-280.
        Wang and Ramdas, "Anytime-valid t-tests and confidence sequences for Gaussian means with unknown variance"
        (2023), arXiv:2310.03722.

    >>> interval_half_width(3, 1.0, 0.05), round(interval_half_width(12, 1.0, 0.05), 2)
    (inf, 1.11)
    """
    wide = 1 + pairs * SPREAD
    # ratio(t) = wide^(-1/2) ((1 + u) / (1 + u/wide))^(n/2) with u = t²/(n − 1), solved for ratio = 1/α
    bound = (math.sqrt(wide) / alpha) ** (2 / pairs)
    if pairs < 2 or bound >= wide:
        return math.inf
    squared_t = (pairs - 1) * (bound - 1) / (1 - bound / wide)
    return deviation * math.sqrt(squared_t / pairs)


def judge(differences: Sequence[float], margin: float, alpha: float, *, lower_is_better: bool = True) -> Judgement:
    """Judge the differences B − A of pairs, which are taken for normal.

    B is equal to A if the interval lies within the margin, and better or worse if it excludes 0 without doing so. All
    answers of a sequence of looks are right together with a probability of at least 1 − ``alpha``.

    >>> judge([0.1, 0.11, 0.09, 0.1, 0.1], margin=0.01, alpha=0.05).answer
    'worse'
    """
    pairs = len(differences)
    mean = fmean(differences) if differences else 0.0
    deviation = stdev(differences) if pairs > 1 else 0.0
    half = interval_half_width(pairs, deviation, alpha) if pairs > 1 else math.inf
    low, high = mean - half, mean + half
    answer: Answer = "undecided"
    if -margin < low and high < margin:
        answer = "equal"
    elif low > 0 or high < 0:
        answer = "worse" if (low > 0) is lower_is_better else "better"
    needed = pairs_needed(mean, deviation, margin, alpha) if pairs > 1 else None
    return Judgement(answer, mean, low, high, needed)


def pairs_needed(mean: float, deviation: float, margin: float, alpha: float) -> int | None:
    """Return the number of pairs whose interval decides, with this mean and deviation of the differences."""
    resolution = max(abs(mean), margin - abs(mean))
    low, high = 2, 4
    while not interval_half_width(high, deviation, alpha) < resolution:
        low, high = high, 2 * high
        if high > MOST_PAIRS:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        is_enough = interval_half_width(middle, deviation, alpha) < resolution
        low, high = (low, middle) if is_enough else (middle, high)
    return high
