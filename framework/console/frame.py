"""Layouts of a board for the available columns and lines: full screen, table, or plain line."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.layout import Layout
from rich.rule import Rule
from rich.text import Text

from ..errors import counted
from .board import LABEL_STYLES, MEAN, Board, Notice, Track, arrow_of
from .grid import ARROW_STYLES, HEADING_STYLE, Cell, fitted
from .grid import Group as Metrics
from .progress import Position, progress_line
from .tables import comparison_rows, table_in_width
from .text import Line, Lines, printable, sparkline

NARROWEST_SIDEBAR, WIDEST_SIDEBAR = 28, 44
LONGEST_SPARKS, SHORTEST_SPARKS = 10, 5
NARROWEST_METRICS = 28
LOWEST_WITH_RESULTS = 14
LOWEST_WITHOUT_NOTICES = 6
ITEM_GAP = 3
LEAST_LINES = 30
NOT_RECORDED = "not recorded"
FIRST = 10  # metrics on a line without live metrics


class Sized:
    """Shows the result of ``draw(width, height)`` for the space that a layout assigns."""

    def __init__(self, draw: Callable[[int, int], RenderableType]) -> None:
        self._draw = draw

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the drawing for the available space."""
        yield self._draw(options.max_width, options.height or options.max_height)


def frame(board: Board, position: Position | None, console: Console) -> Layout:
    """Return the full screen: progress, results, the newest metrics, the live metrics, and notices at the bottom."""
    width, height = console.size
    notices = _notices(board, console, height)
    sidebar = min(WIDEST_SIDEBAR, max(NARROWEST_SIDEBAR, width * 9 // 20))
    length = LONGEST_SPARKS if sidebar == WIDEST_SIDEBAR else SHORTEST_SPARKS
    live, _ = board.groups({name: _cell(board, name, track, length) for name, track in board.tracks.items()})
    _, others = board.groups({name: _cell(board, name, track, 0) for name, track in board.tracks.items()})
    # The progress line omits the numbers of live metrics, unless the screen may have no space for all of these.
    if position is not None and sum(len(group.cells) for group in live) < height // 2:
        shown = {cell.name for group in live for cell in group.cells}
        numbers = {name: number for name, number in position.numbers.items() if name not in shown}
        position = replace(position, numbers=numbers)
    started = progress_line(position, width) if position is not None else Text("starting", "dim")
    legend = f"; -n: n {board.run.loop}s old" if board.run and any(map(board.age, board.tracks.values())) else ""
    parts = [Layout(Group(_title(board), started), size=2), _metrics(live, others, legend, width, sidebar)]
    if height - len(notices) >= LOWEST_WITH_RESULTS:
        parts.insert(1, _results(board, max(2, height // 5)))
    if notices:
        parts.append(Layout(Group(*notices), size=len(notices)))
    screen = Layout()
    screen.split_column(*parts)
    return screen


def _title(board: Board) -> Text:
    run = board.run
    title = Text(no_wrap=True, overflow="ellipsis")
    if run is not None:
        title.append(printable(f"{run.experiment}  {run.strategy}"), "bold")
        title.append(f"  newest metrics: epoch {board.epoch}  step {board.step:,}" if board.step else "")
        title.append(printable(f"  treatments: {', '.join(run.treatments)}") if run.treatments else "")
    return title


def _rule(title: str, style: str = "bold") -> Rule:
    return Rule(Text(title, style), align="left", style="dim")


def _results(board: Board, most: int) -> Layout:
    """Show one row per finished strategy, at most the ``most`` newest."""
    finished = board.results
    if not finished:
        return Layout(_rule("results: no strategy has ended yet"), size=1)
    title = "results" if len(finished) <= most else f"results: the last {most} of {len(finished)} strategies"
    rows = comparison_rows(finished)[-most:]

    def draw(width: int, _: int) -> RenderableType:
        return Group(_rule(title), table_in_width(rows, width))

    return Layout(Sized(draw), size=2 + len(rows))


def _cell(board: Board, name: str, track: Track, sparks: int) -> Cell:
    """Return the newest value of a metric, its trend and its age; without ``sparks`` the age replaces the arrow."""
    age = f"-{age:,}" if (age := board.age(track)) else ""
    text, arrow = track.brief(), arrow_of(track.recent)
    if sparks:
        text, arrow = f"{text} {age}".rstrip(), sparkline(track.recent, sparks) + (arrow or " ")
    return Cell(name, text, arrow if sparks else age or arrow, isinstance(track.last, (list, tuple)))


def _metrics(live: list[Metrics], others: list[Metrics], legend: str, width: int, sidebar: int) -> Layout:
    """Show the other metrics to the left of the live metrics, or only the live metrics on a narrow screen."""

    def draw_live(wide: int, high: int) -> RenderableType:
        groups = live
        if sum(group.height for group in live) >= high:  # omit headings to show more metrics
            groups = [Metrics("", [cell for group in live for cell in group.cells])]
        return _grid(f"live{legend}", groups, wide, high, most_blocks=1)

    aside = Sized(draw_live)
    if width - sidebar - 3 < NARROWEST_METRICS:
        return Layout(aside)
    body = Layout()
    body.split_row(
        Layout(Sized(partial(_grid, "newest metrics", others))),
        Layout(Sized(_divider), size=3),
        Layout(aside, size=sidebar),
    )
    return body


def _divider(_: int, height: int) -> Lines:
    return Lines([[(" │ ", "dim")]] * height)


def _grid(title: str, groups: Sequence[Metrics], width: int, height: int, **options: int) -> Group:
    lines, shown = fitted(groups, width, height - 1, **options)
    total = sum(len(group.cells) for group in groups)
    title = f"{title} ({shown} of {total})" if shown < total else title
    return Group(_rule(title), Lines(lines or [[("" if total else "no values yet", "dim")]]))


def _notices(board: Board, console: Console, height: int) -> list[RenderableType]:
    """Show critical notices, then the last other ones, and the number of printed lines, at the bottom of the screen."""
    labels = Counter(notice.label for notice in board.notices)
    parts = [counted(labels[label], label) for label in LABEL_STYLES if labels[label]]
    if board.printed_lines:
        parts.append(counted(board.printed_lines, "printed line") + ", shown at the end")
    most = min(max(2, height // 6), height - LOWEST_WITHOUT_NOTICES)
    if not parts or most < 1:
        return []
    lines: list[Text] = []
    for notice in sorted(reversed(board.notices), key=lambda notice: not notice.label.startswith("critical")):
        wrapped = notice_lines(notice, console)
        if len(lines) + len(wrapped) > most:
            break
        lines += wrapped
    worst = next((style for label, style in LABEL_STYLES.items() if labels[label]), "bold")
    return [_rule(", ".join(parts), worst), *lines]


def notice_lines(notice: Notice, console: Console) -> list[Text]:
    """Return a notice on at most two lines, wrapped and truncated between words.

    >>> notice_lines(Notice("note", "one two three four five six"), Console(width=18))
    [<text 'note: one two' [Span(0, 6, 'bold cyan')] ''>, <text '  three four …' [] ''>]
    """
    lines = list(notice.text().wrap(console, max(1, console.width - 4)))
    kept = lines[:2]
    for line in kept:
        line.rstrip()
    if len(lines) > len(kept):
        kept[-1].append(" …")
    return [kept[0], *(Text("  ") + line for line in kept[1:])]


def newest_table(board: Board, width: int, height: int, *, recorded: bool) -> Group:
    """Show the news of a board on ``height`` lines, at least thirty: first live metrics, then other metrics by hook.

    Every hook shows equally many metrics: first changed numbers, then lists, then unchanged numbers.
    """
    news = board.news()
    cells = {name: Cell(name, track.mean(), arrow_of(track.recent), _rank(track)) for name, track in news.items()}
    live, others = board.groups(cells)
    head = list(group_lines(live, width))
    alerts = _alerts(board)
    lines, shown = fitted(others, width, max(LEAST_LINES, height - len(head) - 3) - len(alerts))
    total = sum(len(group.cells) for group in others)
    remarks = [f"{total - shown:,} more, {'in the record' if recorded else NOT_RECORDED}"] * (shown < total)
    remarks += [f"{MEAN}mean since the last table"] * any(track.count for track in news.values())
    foot: list[Line] = [[(text, "dim")] for text in ("; ".join(remarks), *alerts) if text]
    run = printable(f"{board.run.experiment}  {board.run.strategy}  ") if board.run else ""
    return Group(_rule(f"{run}epoch {board.epoch}  step {board.step:,}"), Lines([*head, *lines, *foot]))


def snapshot_line(board: Board, *, recorded: bool, others: bool = True) -> str:
    """Return one line with the live metrics, or the first others, and the number of alerts.

    Without ``others``, only new live metrics are shown if the run has any, so that the line may be empty, as for a run
    that ended within an epoch.
    """
    unit, strategy = (board.run.loop, printable(board.run.strategy)) if board.run else ("", "")
    ages = {name: counted(age, unit) + " old" for name, track in board.tracks.items() if (age := board.age(track))}
    cells = {name: Cell(name, track.describe(ages.get(name, ""))) for name, track in board.tracks.items()}
    live, rest = board.groups(cells)
    others = others or not board.has_live_metrics
    has_news = others or board.groups({name: cells[name] for name in board.news()})[0]
    shown = [f"{cell.name} {cell.text}" for group in live for cell in group.cells if has_news]
    if others and not shown:
        shown = [f"{group.heading}/{cell.name} {cell.text}" for group in rest for cell in group.cells][:FIRST]
    lost = "" if recorded else f"{counted(board.count, 'value')} {NOT_RECORDED}"
    place = f"epoch {board.epoch}, step {board.step:,}" if unit == "epoch" else f"step {board.step:,}"
    parts = [*filter(None, [", ".join(shown), lost, *_alerts(board)])]
    return f"{strategy}, {place}: " + "; ".join(parts) if parts else ""


def _alerts(board: Board) -> list[str]:
    counts = ", ".join(f"{count:,} {printable(kind)}" for kind, count in board.alerts.items())
    return [f"alerts: {counts}"] * bool(counts)


def _rank(track: Track) -> int:
    """Return 0 for a number that changed since the last table, 1 for a list, 2 for an unchanged value."""
    return 2 if track.told == track.mean() else isinstance(track.last, (list, tuple))


def group_lines(groups: Sequence[Metrics], width: int) -> Iterator[Line]:
    """Yield one line per group, with headings in one column, wrapping cells that do not fit."""
    begin = max((len(group.heading) for group in groups), default=0) + ITEM_GAP
    for group in groups:
        line: Line = [(f"{group.heading:{begin}}", HEADING_STYLE)]
        room = width - begin
        for cell in group.cells:
            name, arrow = f"{cell.name} ", f" {cell.arrow}" if cell.arrow else ""
            taken = cell_len(name + cell.text + arrow) + ITEM_GAP
            if taken - ITEM_GAP > room and len(line) > 1:
                yield line
                line, room = [(" " * begin, "")], width - begin
            gap = " " * ITEM_GAP if len(line) > 1 else ""
            line += [(gap + name, ""), (cell.text, "bold"), (arrow, ARROW_STYLES[cell.arrow])]
            room -= taken
        yield line
