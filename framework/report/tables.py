"""Escaped texts and tables in HTML, and the lines that distinguish runs, also without colour vision and in print."""

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import shortened
from .panels import COLOURS as PLOTTED

MOST_TABLE_ROWS, LONGEST_CELL = 1000, 200
COLOURS = (*PLOTTED[:-1], "#808080")
"""The colours of plots, with grey in place of black, which is invisible on a dark page."""
DASHES: Sequence[Sequence[int]] = ((), (2, 3), (9, 3, 2, 3), (12, 4))
"""Lengths of strokes and gaps in pixels, one pattern for each use of all colours."""
TREATED: Sequence[Sequence[int]] = ((6, 4), (6, 4, 1, 4), (14, 3, 5, 3), (3, 2))
"""The same for runs with treatments, whose curves are dashed."""


@dataclass(frozen=True)
class RunStyle:
    """The colour and the dash pattern of a run's curves."""

    colour: str
    dash: Sequence[int] = ()

    @classmethod
    def numbered(cls, place: int, *, is_treated: bool = False) -> "RunStyle":
        """Return the style of the run, or the group of seeds, at a place.

        >>> RunStyle.numbered(0), RunStyle.numbered(8)
        (RunStyle(colour='#0072B2', dash=()), RunStyle(colour='#D55E00', dash=(2, 3)))
        """
        patterns = TREATED if is_treated else DASHES
        return cls(COLOURS[place % len(COLOURS)], patterns[place // len(COLOURS) % len(patterns)])

    @property
    def swatch(self) -> str:
        """A piece of the line as an inline picture."""
        dashes = " ".join(map(str, self.dash))
        line = f'<line x1="0" y1="5" x2="28" y2="5" stroke="{self.colour}" stroke-dasharray="{dashes}"></line>'
        return f'<svg class="swatch" viewBox="0 0 28 10" aria-hidden="true">{line}</svg>'


def styles_of(groups: Sequence[str], treated: Sequence[bool]) -> list[RunStyle]:
    """Return the style of each run; the seeds of a group share one if there are several groups."""
    distinct = list(dict.fromkeys(groups))
    is_by_group = 1 < len(distinct) < len(groups)
    places = [distinct.index(group) if is_by_group else index for index, group in enumerate(groups)]
    return [RunStyle.numbered(place, is_treated=has) for place, has in zip(places, treated, strict=True)]


def text(value: object, most: int = LONGEST_CELL) -> str:
    r"""Return a value as shortened and escaped HTML text, without control characters.

    >>> text("<script>\0")
    '&lt;script&gt;?'
    """
    shown = shortened("" if value is None else str(value), most)
    return html.escape("".join(character if character.isprintable() else "?" for character in shown))


def titled(shown: Any) -> str:
    """Return an attribute with the full name of a run whose label is shorter; empty if it is not."""
    return f' title="{text(shown.name)}"' if shown.name not in ("", shown.label) else ""


def labelled(shown: Any, style: RunStyle) -> str:
    """Return the label of a run behind a piece of its line."""
    return f"<span{titled(shown)}>{style.swatch}{text(shown.label)}</span>"


def table(
    title: str,
    heading: Sequence[str],
    rows: Sequence[Sequence[object]],
    *,
    level: int = 2,
    most: int = MOST_TABLE_ROWS,
    folded: bool = False,
) -> str:
    """Return an HTML table under a heading of this level, or in a folded section; empty if it has no rows."""
    if not rows:
        return ""
    lines = [f"<tr>{''.join(f'<td>{text(cell)}</td>' for cell in row)}</tr>" for row in rows[:most]]
    body = grid(title, heading, lines)
    more = f"<p>The first {len(lines):,} of {len(rows):,} rows.</p>" if len(lines) < len(rows) else ""
    name = f"<h{level}>{text(title)}</h{level}>"
    if folded:
        return f"<section><details><summary>{name}</summary>{more}{body}</details></section>"
    return f"<section>{name}{more}{body}</section>"


def grid(name: str, heading: Sequence[str], lines: Sequence[str]) -> str:
    """Return an HTML table of lines of HTML, which scrolls within the page, also by keyboard."""
    head = "".join(f'<th scope="col">{text(cell)}</th>' for cell in heading)
    content = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"
    return f'<div class="wide" role="region" aria-label="{text(name)}" tabindex="0">{content}</div>'


def cells(row: Mapping[str, Any], names: Sequence[str]) -> list[Any]:
    """Return the values of a row under these names, with floats as text of four significant digits."""
    return [f"{row.get(name):.4g}" if isinstance(row.get(name), float) else row.get(name) for name in names]
