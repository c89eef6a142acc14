"""The full-screen display as lines of text: a pure function of what is known and of the size of the terminal."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.cells import cell_len

from .board import Board, parted
from .grid import ARROW_STYLES, HEADING_STYLE, Group, fitted
from .lines import Line, cropped, padded, printable, shortened
from .notices import LABEL_STYLES, Notice
from .progress import LONGEST_BAR, SHORTEST_BAR, Position
from .tables import REMARKS, comparison_rows

NARROWEST_SIDEBAR, WIDEST_SIDEBAR = 28, 44
NARROWEST_METRICS = 28
LINES_OF_A_NOTICE = 2


@dataclass(frozen=True)
class Glyphs:
    """The characters that a terminal may not have."""

    bar: str = "━"
    rule: str = "─"
    wall: str = "│"


def frame(board: Board, position: Position | None, width: int, height: int, glyphs: Glyphs = Glyphs()) -> list[Line]:
    """Return exactly ``height`` lines, none wider than ``width`` columns."""
    if width < 1 or height < 1:
        return []
    lines = [_title(board, width), _progress(position, width, glyphs)]
    bottom = _notices(board, width, height, glyphs)
    if height - len(bottom) >= 14:
        lines += _results(board.results, width, max(2, height // 5), glyphs)
    room = height - len(lines) - len(bottom)
    lines += _body(board, width, room, glyphs) if room > 1 else []
    lines = lines[: max(0, height - len(bottom))]
    lines += [[]] * (height - len(lines) - len(bottom)) + bottom
    return [cropped(line, width) for line in lines[:height]]


def _title(board: Board, width: int) -> Line:
    run = board.run
    if run is None:
        return []
    title = shortened(printable(f"{run.experiment}  {run.strategy}"), width)
    where = f"  newest metrics: epoch {board.epoch}  step {board.step:,}" if board.step else ""
    if run.treatments:
        where += printable(f"  treatments: {', '.join(run.treatments)}")
    return [(title, "bold"), (where if cell_len(title + where) <= width else "", "")]


def _progress(position: Position | None, width: int, glyphs: Glyphs) -> Line:
    if position is None:
        return [("starting", "dim")]
    tail = position.fitted(width - SHORTEST_BAR - 1)
    room = max(0, min(LONGEST_BAR, width - cell_len(tail) - 1))
    done = round(room * position.share)
    style = "green" if position.share >= 1 else "magenta"
    return [(glyphs.bar * done, style), (" " * (room - done), "on grey23"), (" " + tail, "")]


def _rule(title: str, width: int, glyphs: Glyphs, style: str = "bold") -> Line:
    title = shortened(title, width)
    return [(title, style), (" " + glyphs.rule * max(0, width - cell_len(title) - 1), "dim")]


def _results(summaries: Sequence[Mapping[str, Any]], width: int, most: int, glyphs: Glyphs) -> list[Line]:
    """Show one row for each finished strategy, the newest if there is no room for all."""
    if not summaries:
        return [_rule("results: no strategy has ended yet", width, glyphs)]
    title = "results" if len(summaries) <= most else f"results: the last {most} of {len(summaries)} strategies"
    return [_rule(title, width, glyphs), *table_lines(comparison_rows(summaries)[-most:], width)]


def table_lines(rows: Sequence[Mapping[str, str]], width: int) -> list[Line]:
    """Return a table with a line of headings, its last columns left out if ``width`` columns do not hold them.

    >>> table_lines([{"strategy": "stride", "epochs": "8"}], 20)
    [[('strategy  epochs', 'dim')], [('stride         8', '')]]
    """
    names = [name for name in rows[0] if name not in REMARKS and any(row.get(name) for row in rows)]
    widths = {name: max(len(name), *(cell_len(row.get(name, "")) for row in rows)) for name in names}
    while len(names) > 1 and sum(widths[name] for name in names) + 2 * (len(names) - 1) > width:
        names.pop()
    texts = [{name: name for name in names}, *rows]
    first = names[0]
    lines = [
        row.get(first, "").ljust(widths[first])
        + "".join("  " + row.get(name, "").rjust(widths[name]) for name in names[1:])
        for row in texts
    ]
    return [[(printable(line), "" if index else "dim")] for index, line in enumerate(lines)]


def _body(board: Board, width: int, height: int, glyphs: Glyphs) -> list[Line]:
    """Show the other metrics to the left of the live ones; the latter alone where there is no room for both."""
    live, others = parted(board.cells(), board.live_metrics, board.run)
    sidebar = min(WIDEST_SIDEBAR, max(NARROWEST_SIDEBAR, width * 2 // 5), width)
    left = width - sidebar - 3
    if left < NARROWEST_METRICS:
        return [_rule("live", width, glyphs), *sidebar_lines(live, width, height - 1)]
    metrics, shown = fitted(others, left, height - 1)
    total = sum(len(group.metrics) for group in others)
    title = f"newest metrics ({shown} of {total})" if shown < total else "newest metrics"
    aside = [_rule("live", sidebar, glyphs), *sidebar_lines(live, sidebar, height - 1)]
    return _beside([_rule(title, left, glyphs), *metrics], aside, left, height, glyphs)


def _beside(left: Sequence[Line], right: Sequence[Line], width: int, height: int, glyphs: Glyphs) -> list[Line]:
    wall = (f"{glyphs.wall} ", "dim")
    rows = [padded(cropped(left[row] if row < len(left) else [], width), width + 1) for row in range(height)]
    return [[*line, wall, *(right[row] if row < len(right) else [])] for row, line in enumerate(rows)]


def sidebar_lines(groups: Sequence[Group], width: int, height: int) -> list[Line]:
    """Show groups of live metrics, values and arrows to the right; headings go first where lines are short."""
    rows = sum(len(group.metrics) for group in groups)
    headings = rows + len(groups) <= height
    indent = 2 if headings else 0
    lines: list[Line] = []
    for group in groups:
        if headings:
            lines.append([(shortened(printable(group.heading), width), HEADING_STYLE)])
        for cell in group.metrics:
            name = shortened(printable(cell.name), max(1, width - indent - cell_len(cell.text) - 4))
            gap = " " * max(1, width - indent - cell_len(name) - cell_len(cell.text) - 2)
            arrow = (f" {cell.arrow}", ARROW_STYLES[cell.arrow])
            lines.append([(" " * indent + name + gap, ""), (cell.text, "bold"), arrow])
    if not lines:
        lines = [[("no values yet", "dim")]]
    if len(lines) > height:
        lines = [*lines[: height - 1], [(f"{len(lines) - height + 1} more", "dim")]]
    return lines[: max(0, height)]


def _notices(board: Board, width: int, height: int, glyphs: Glyphs) -> list[Line]:
    """Show the last warnings and notes, and how much was printed, at the foot of the screen."""
    parts = [f"{count} {label}{'s' * (count > 1)}" for label, count in _counts(board.notices)]
    if board.printed_lines:
        parts.append(f"{board.printed_lines} printed line{'s' * (board.printed_lines > 1)}, shown at the end")
    most = min(max(2, height // 6), height - 6)
    if not parts or most < 1:
        return []
    lines: list[Line] = []
    for notice in reversed(board.notices):
        wrapped = notice_lines(notice, width)
        if len(lines) + len(wrapped) > most:
            break
        lines = [*wrapped, *lines]
    warned = any(notice.label == "warning" for notice in board.notices)
    return [_rule(", ".join(parts), width, glyphs, "bold yellow" if warned else "bold"), *lines]


def _counts(notices: Iterable[Notice]) -> list[tuple[str, int]]:
    labels = [notice.label for notice in notices]
    return [(label, labels.count(label)) for label in ("warning", "note") if label in labels]


def notice_lines(notice: Notice, width: int) -> list[Line]:
    """Return a notice on at most two lines, broken and cut between words.

    >>> lines = notice_lines(Notice("note", "one two three four five six"), 14)
    >>> ["".join(text for text, _ in line) for line in lines]
    ['note: one two', '  three four …']
    """
    label = f"{notice.label}:"
    texts = [label]
    for word in printable(notice.sentence).split(" "):
        last = len(texts) == LINES_OF_A_NOTICE
        if cell_len(texts[-1]) + 1 + cell_len(word) <= width - 2 * last:
            texts[-1] += " " + word
        elif not last:
            texts.append("  " + shortened(word, max(1, width - 4)))
        else:
            texts[-1] += " …"
            break
    return [[(label, LABEL_STYLES[notice.label]), (texts[0][len(label) :], "")], *([(text, "")] for text in texts[1:])]
