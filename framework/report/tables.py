"""Escaped texts and tables in HTML."""

import html
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import shortened

MOST_TABLE_ROWS, LONGEST_CELL = 1000, 200


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


def labelled(shown: Any, style: Any) -> str:
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
