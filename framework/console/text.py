"""Formatting of numbers, names and lines, and truncation to the available columns."""

import math
import sys
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions, RenderResult
from rich.segment import Segment

LEAST = 14  # minimum width of the two flexible columns
SPARKS = "▁▂▃▄▅▆▇█"
ASCII = str.maketrans("↑↓→│…ø" + SPARKS, "^v>|~o_.-~=+*#")
Line = list[tuple[str, str]]  # pieces of text with their styles; an empty text for no style


class Lines:
    """Lines of styled pieces that rich crops and never wraps; several times faster than its texts and tables."""

    def __init__(self, lines: Sequence[Line]) -> None:
        self._lines = lines

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the pieces, with symbols replaced for a terminal that only supports ASCII."""
        for line in self._lines:
            for text, style in line:
                supported = text.translate(ASCII) if options.ascii_only else text
                yield Segment(supported, console.get_style(style) if style else None)
            yield Segment.line()


def number_text(value: float) -> str:
    """Format a number with four significant digits; integers in full, with commas from five digits.

    >>> [number_text(value) for value in (0.123456, 12345.6, 1.5e-7, 1234567, 42, float("nan"), True)]
    ['0.1235', '12,346', '1.5e-07', '1,234,567', '42', 'nan', 'True']
    """
    if isinstance(value, int) and abs(value) > sys.float_info.max:
        return "inf" if value > 0 else "-inf"
    if isinstance(value, bool) or not math.isfinite(value):
        return str(value)
    if isinstance(value, int) or 1e4 <= abs(value) < 1e7:
        return f"{value:,.0f}" if abs(value) >= 1e4 else str(value)
    return f"{value:.4g}"


def value_text(value: Any, width: int = 40) -> str:
    """Format a metric value on one line: of a list or dict, the first items in ``width`` columns and the count.

    >>> value_text([0.123456, 2, 3]), value_text([1.25e-7, 33.333, 44.44], 20), value_text({"a": 1 / 3})
    ('0.1235, 2, 3', '1.25e-07, ... (3)', 'a 0.3333')
    """
    if isinstance(value, (int, float)):
        return number_text(value)
    if isinstance(value, Mapping):
        texts = [f"{key} {value_text(item)}" for key, item in islice(value.items(), width)]
    elif isinstance(value, (list, tuple)):
        texts = [value_text(item) for item in value[:width]]
    else:
        return str(value)
    for kept in range(len(texts), 0, -1):
        text = ", ".join(texts[:kept]) + ("" if kept == len(value) else f", ... ({len(value)})")
        if len(text) <= width:
            return text
    return f"{len(value)} values" if value else "none"


def sparkline(values: Sequence[float], width: int) -> str:
    """Return the last values as bars, scaled from their minimum to their maximum; ``?`` for a non-finite value.

    >>> sparkline([9, 1, 2, float("nan"), 8], 4), sparkline([3, 3], 4), sparkline([1.0], 4)
    ('▁▂?█', '▁▁', '')
    """
    shown = values[-width:] if width > 0 and len(values) > 1 else []
    halves = [value / 2 for value in shown]  # the difference of two finite floats may overflow
    finite = [value for value in halves if math.isfinite(value)] or [0.0]
    least, span = min(finite), max(finite) - min(finite)
    levels = [round((value - least) / (span or 1) * 7) if math.isfinite(value) else -1 for value in halves]
    return "".join("?" if level < 0 else SPARKS[level] for level in levels)


def duration_text(seconds: float) -> str:
    """Format a duration in hours, minutes and seconds.

    >>> [duration_text(seconds) for seconds in (0.4, 63.2, 7384, 200000)]
    ['0:00', '1:03', '2:03:04', '2 d 7:33:20']
    """
    if not math.isfinite(seconds):
        return str(seconds)
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    clock = f"{hour}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
    return f"{days} d {clock}" if days else clock


def rate_text(per_second: float, unit: str) -> str:
    """Format a speed in units per second, or in seconds per unit if it is slow.

    >>> rate_text(2.125, "epoch"), rate_text(0.08, "epoch"), rate_text(1234.5, "step")
    ('2.12 epochs/s', '12.5 s/epoch', '1,234 steps/s')
    """
    if per_second >= 1:
        return f"{per_second:,.0f} {unit}s/s" if per_second >= 100 else f"{per_second:.3g} {unit}s/s"
    return f"{1 / per_second:.3g} s/{unit}" if per_second > 0 else f"0 {unit}s/s"


def shortened(text: str, width: int, *, keep_end: bool = True) -> str:
    """Shorten a text to ``width`` columns, keeping its end, which is often the most informative part of a name.

    >>> shortened("loss_autocorrelation_lag_10", 20), shortened("a long text", 7, keep_end=False)
    ('loss_auto…ion_lag_10', 'a long…')
    """
    if cell_len(text) <= width:
        return text
    tail = width // 2 if keep_end and width > 4 and cell_len(text) == len(text) else 0
    return set_cell_size(text, max(0, width - 1 - tail)) + "…" * (width > 0) + (text[-tail:] if tail else "")


def in_columns(rows: Sequence[Mapping[str, str]], width: int, flexible: tuple[str, str]) -> list[str]:
    """Return a heading and a line per row, without empty columns.

    The first ``flexible`` column is shortened if needed; the second is the last column and is truncated.

    >>> in_columns([{"a": "0123456789abcdefghi", "b": "", "c": "a text of 20 columns"}], 30, ("a", "c"))
    ['a               c', '012345…cdefghi  a text of 20 …']
    """
    names = [name for name in rows[0] if any(row[name] for row in rows)]
    widths = {name: max(cell_len(text) for text in (name, *(row[name] for row in rows))) for name in names}
    others = sum(widths[name] + 2 for name in names if name not in flexible)
    widths[flexible[0]] = min(widths[flexible[0]], max(LEAST, width - others - LEAST - 2))
    lines = [
        [set_cell_size(shortened(row[name], widths[name]), widths[name]) for name in names]
        for row in ({name: name for name in names}, *rows)
    ]
    return [shortened("  ".join(cells).rstrip(), width, keep_end=False) for cells in lines]


def cleaned(value: Any) -> Any:
    r"""Apply :func:`printable` to all text in a value, including lists and mappings.

    >>> cleaned({"a\x1b": ["b\n", 1]})
    {'a?': ['b?', 1]}
    """
    if isinstance(value, Mapping):
        return {cleaned(key): cleaned(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [cleaned(item) for item in value]
    return printable(value) if isinstance(value, str) else value


def printable(text: str) -> str:
    r"""Replace control characters in a text, which a terminal could interpret as commands.

    >>> printable("a\x1b[2Jb\tc")
    'a?[2Jb?c'
    """
    return text if text.isprintable() else "".join(item if item.isprintable() else "?" for item in text)
