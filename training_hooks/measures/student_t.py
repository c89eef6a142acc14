"""Student's t, by its finite series: how wide an interval is whose error comes from few numbers."""

import math

LARGEST_T = 1e9
HALVINGS = 200


def central_probability(t: float, freedom: int) -> float:
    """Return P(|T| ≤ t) of Student's t, t ≥ 0, by the finite series of Abramowitz & Stegun, 26.7.3 and 26.7.4.

    >>> round(central_probability(1.0, 1), 4), round(central_probability(2.0, 2), 4)
    (0.5, 0.8165)
    """
    angle = math.atan(t / math.sqrt(freedom))
    cosine, odd = math.cos(angle), freedom % 2
    term = total = 0.0 if freedom == 1 else cosine if odd else 1.0
    for k in range(1 + odd, freedom - 2, 2):
        term *= k / (k + 1) * cosine**2
        total += term
    partial = math.sin(angle) * total
    return 2 / math.pi * (angle + partial) if odd else partial


def critical_value(confidence: float, freedom: int) -> float:
    """Return the t with P(|T| ≤ t) = ``confidence`` for ``freedom`` ≥ 1 degrees of freedom, by bisection.

    >>> round(critical_value(0.95, 2), 3), round(critical_value(0.95, 7), 3)
    (4.303, 2.365)
    """
    low, high = 0.0, LARGEST_T
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if central_probability(middle, freedom) < confidence else (low, middle)
    return high
