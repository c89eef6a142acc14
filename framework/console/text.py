"""How numbers are shown to people: four significant digits, and times and rates in the unit that fits."""

import math
from collections.abc import Mapping
from typing import Any

SHOWN_ITEMS = 3


def number_text(value: float) -> str:
    """Return a number with four significant digits; integers are shown in full, with commas from five digits on.

    >>> [number_text(value) for value in (0.123456, 12345.6, 1.5e-7, 1234567, 42, float("nan"), True)]
    ['0.1235', '12,346', '1.5e-07', '1,234,567', '42', 'nan', 'True']
    """
    if isinstance(value, bool) or not math.isfinite(value):
        return str(value)
    if isinstance(value, int) or 1e4 <= abs(value) < 1e7:
        return f"{value:,.0f}" if abs(value) >= 1e4 else str(value)
    return f"{value:.4g}"


def value_text(value: Any) -> str:
    """Return any metric value on one short line: the first items of lists and dicts, and how many there are.

    >>> value_text([0.5, 1.25, 3, 4, 5]), value_text({"a": 0.123456})
    ('0.5, 1.25, 3, ... (5)', 'a 0.1235')
    """
    if isinstance(value, Mapping):
        return _listed([f"{key} {value_text(item)}" for key, item in list(value.items())[:SHOWN_ITEMS]], len(value))
    if isinstance(value, (list, tuple)):
        return _listed([value_text(item) for item in value[:SHOWN_ITEMS]], len(value))
    return number_text(value) if isinstance(value, (int, float)) else str(value)


def _listed(shown: list[str], total: int) -> str:
    return ", ".join(shown) + (f", ... ({total})" if total > len(shown) else "") if total else "none"


def duration_text(seconds: float) -> str:
    """Return a duration as hours, minutes and seconds.

    >>> [duration_text(seconds) for seconds in (0.4, 63.2, 7384, 200000)]
    ['0:00', '1:03', '2:03:04', '2 d 7:33:20']
    """
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    clock = f"{hour}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
    return f"{days} d {clock}" if days else clock


def rate_text(per_second: float, unit: str) -> str:
    """Return a speed in units per second, or in seconds per unit where it is slow.

    >>> rate_text(2.125, "epoch"), rate_text(0.08, "epoch"), rate_text(1234.5, "step")
    ('2.12 epochs/s', '12.5 s/epoch', '1,234 steps/s')
    """
    if per_second >= 1:
        return f"{per_second:,.0f} {unit}s/s" if per_second >= 100 else f"{per_second:.3g} {unit}s/s"
    return f"{1 / per_second:.3g} s/{unit}" if per_second > 0 else f"0 {unit}s/s"
