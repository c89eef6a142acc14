"""The metrics that came since the last table: as a table on a terminal, as plain lines elsewhere."""

from collections.abc import Iterator, Sequence

from rich.cells import cell_len
from rich.console import Group as Renderables
from rich.rule import Rule
from rich.text import Text

from .board import MEAN, Board, Track, arrow_of
from .grid import ARROW_STYLES, HEADING_STYLE, Cell, Group, fitted
from .text import Line, Lines, printable

ITEM_GAP = 3
LEAST_LINES = 30


def newest_table(board: Board, width: int, height: int) -> Renderables:
    """Show the news of a board on ``height`` lines, or thirty: the live metrics on top, below the others by hook.

    Every hook shows as many metrics as every other, numbers that changed since the last table before lists and what
    stood still.
    """
    news = board.news()
    live, others = board.groups(
        {name: Cell(name, track.mean(), arrow_of(track.recent), _rank(track)) for name, track in news.items()}
    )
    head = list(group_lines(live, width))
    lines, shown = fitted(others, width, max(LEAST_LINES, height - len(head) - 3))
    total = sum(len(group.cells) for group in others)
    remarks = [f"{total - shown:,} more in the files of --hook-jsonl or --hook-csv"] * (shown < total)
    remarks += [f"{MEAN}mean since the last table"] * any(track.count for track in news.values())
    foot: list[Line] = [[("; ".join(remarks), "dim")]] if remarks else []
    title = Rule(Text(_title(board), style="bold"), align="left", style="dim")
    return Renderables(title, Lines([*head, *lines, *foot]))


def newest_lines(board: Board) -> Iterator[str]:
    """Yield the news of a board in full, one line for each hook; a series as ``last / mean (number of values)``."""
    yield _title(board)
    for hook in board.by_hook({name: Cell(name, track.whole()) for name, track in board.news().items()}):
        yield f"  {hook.heading}: " + ", ".join(f"{cell.name} {cell.text}" for cell in hook.cells)


def _title(board: Board) -> str:
    run = f"{board.run.experiment}  {board.run.strategy}  " if board.run else ""
    return f"{run}epoch {board.epoch}  step {board.step:,}"


def _rank(track: Track) -> int:
    """Return 0 for a number that has changed since the last table, 1 for a list, 2 for what stood still."""
    return 2 if track.told == track.mean() else track.is_list


def group_lines(groups: Sequence[Group], width: int) -> Iterator[Line]:
    """Yield each group on a line of its own, headings in one column, what does not fit on further lines."""
    begin = max((len(group.heading) for group in groups), default=0) + ITEM_GAP
    for group in groups:
        line: Line = [(f"{printable(group.heading):{begin}}", HEADING_STYLE)]
        room = width - begin
        for cell in group.cells:
            name, arrow = f"{printable(cell.name)} ", f" {cell.arrow}" if cell.arrow else ""
            taken = cell_len(name + cell.text + arrow) + ITEM_GAP
            if taken - ITEM_GAP > room and len(line) > 1:
                yield line
                line, room = [(" " * begin, "")], width - begin
            gap = " " * ITEM_GAP if len(line) > 1 else ""
            line += [(gap + name, ""), (cell.text, "bold"), (arrow, ARROW_STYLES[cell.arrow])]
            room -= taken
        yield line
