"""Student's t distribution, also for fractional degrees of freedom, with the regularized incomplete beta function."""

import math
from functools import cache


def two_sided_p(t: float, freedom: float) -> float:
    """Return the two-sided p-value P(|T| ≥ |t|).

    >>> round(two_sided_p(1.0, 1), 4), round(1 - two_sided_p(2.0, 2), 4)
    (0.5, 0.8165)
    """
    # P(|T| ≥ |t|) = I_x(ν/2, 1/2) with x = ν/(ν + t²); 1 − x is computed without cancellation.
    return _regularized_beta(
        freedom / (freedom + t * t), 1 / (1 + freedom / (t * t)) if t * t else 0.0, freedom / 2, 0.5
    )


@cache
def critical_t(freedom: float, confidence: float = 0.95) -> float:
    """Return the t with P(|T| ≤ t) = ``confidence``: the half-width of an interval in standard errors; by bisection.

    >>> round(critical_t(2), 3), round(critical_t(7), 3)
    (4.303, 2.365)
    """
    low, high = 0.0, 1e9
    # P(|T| ≥ t) decreases in t: keep the half of [low, high] in which it passes 1 − confidence.
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if two_sided_p(middle, freedom) > 1 - confidence else (low, middle)
    return high


def _regularized_beta(x: float, complement: float, a: float, b: float) -> float:
    """Return I_x(a, b), with ``complement`` = 1 − x, by the continued fraction DLMF 8.17.22 and Lentz's algorithm."""
    # I_x(a, b) = 1 − I_{1−x}(b, a): the fraction converges fast only for x ≤ (a + 1)/(a + b + 2).
    if x * (a + b + 2) > a + 1:
        return 1 - _regularized_beta(complement, x, b, a)
    if x == 0:
        return 0.0
    # value = ∏ up·down over the terms d_m of the fraction 1 + d₁/(1 + d₂/(1 + …)), until a factor is 1.
    value, up, down, m = 1.0, 1.0, 0.0, 1
    while abs(up * down - 1) > 1e-15 and m < 10**5:
        numerator = -(a + m // 2) * (a + b + m // 2) * x if m % 2 else m // 2 * (b - m // 2) * x
        term = numerator / ((a + m - 1) * (a + m))
        down, up = 1 / (1 + term * down), 1 + term / up
        value, m = value * up * down, m + 1
    # I_x(a, b) = x^a (1 − x)^b / (a B(a, b)) / value
    power = a * math.log(x) + b * math.log(complement) + math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    return math.exp(power) / (a * value)
