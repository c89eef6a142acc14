"""Lines of styled text, measured in columns: what the full-screen display is made of, hundreds of times cheaper."""

from collections.abc import Iterable

from rich.cells import cell_len, chop_cells
from rich.text import Text

Line = list[tuple[str, str]]
"""Pieces of text, each with its style; an empty style is none."""


def width_of(line: Line) -> int:
    """Return how many columns a line takes."""
    return sum(cell_len(text) for text, _ in line)


def padded(line: Line, width: int) -> Line:
    """Return a line of at least ``width`` columns."""
    missing = width - width_of(line)
    return [*line, (" " * missing, "")] if missing > 0 else line


def cropped(line: Line, width: int) -> Line:
    """Cut a line at ``width`` columns.

    >>> cropped([("ab", "bold"), ("cdef", "")], 4)
    [('ab', 'bold'), ('c…', '')]
    """
    if width_of(line) <= width:
        return line
    kept: Line = []
    room = width - 1
    for text, style in line:
        if cell_len(text) > room:
            start = chop_cells(text, room)[0] if room > 0 else ""
            return [*kept, (start + "…" if width > 0 else "", style)]
        kept.append((text, style))
        room -= cell_len(text)
    return kept


def as_text(lines: Iterable[Line]) -> Text:
    """Return lines as a text of rich."""
    return Text("\n").join(Text.assemble(*line) for line in lines)


def shortened(name: str, width: int, *, keep_end: bool = True) -> str:
    """Shorten a name to ``width`` columns; its end, which often tells most, is kept.

    >>> shortened("loss_autocorrelation_lag_10", 20), shortened("a long text", 7, keep_end=False)
    ('loss_auto…ion_lag_10', 'a long…')
    """
    if len(name) <= width and cell_len(name) <= width:
        return name
    if cell_len(name) > len(name):
        return cropped([(name, "")], width)[0][0]
    tail = width // 2 if keep_end and width > 4 else 0
    return name[: max(0, width - 1 - tail)] + "…" * (width > 0) + (name[-tail:] if tail else "")


def printable(text: str) -> str:
    r"""Return a text without anything that a terminal would take as a command.

    >>> printable("a\x1b[2Jb\tc")
    'a?[2Jb?c'
    """
    return text if text.isprintable() else "".join(item if item.isprintable() else "?" for item in text)
