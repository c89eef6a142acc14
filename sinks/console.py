"""The newest metrics as one table at every SNAPSHOT."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from loopscope.console import (
    ARROW_STYLES,
    HEADING_STYLE,
    MEAN,
    Board,
    Cell,
    Group,
    Groups,
    Line,
    Lines,
    Track,
    fitted,
    make_console,
    printable,
)
from loopscope.hooks import HookPoint, MetricSink, RunInfo, SinkRegistry
from rich.cells import cell_len
from rich.console import Console
from rich.rule import Rule
from rich.text import Text

from .record import plain

ITEM_GAP = 3
LEAST_LINES = 30


@SinkRegistry.register
class ConsoleSink(MetricSink):
    """Show the newest metrics as a table at every SNAPSHOT.

    Metrics are gathered from every point and shown together, per-parameter ones (three or more parts of a path) left
    out. What is left at the end of a strategy is shown then.

    On a terminal the table is no taller than that, or than thirty lines: the metrics of ``first`` stand on top, and of
    the others every hook shows as many as every other, numbers that changed since the last table before lists and what
    stood still. An arrow tells which way a metric went over its last three values; of a series the mean since the last
    table is shown.
    Where there is no terminal the table is plain lines with everything, one for each hook, a series as
    ``last / mean (number of values)``.

    Args:
        console: where to show it; standard output by default.
        first: full names of metrics by group; ``training_metrics`` where there are none.
    """

    name: ClassVar[str] = "console"

    def __init__(self, *, console: Console | None = None, first: Groups | None = None) -> None:
        self._console = console or make_console()
        self._board = Board(first or {})

    def set_run_context(self, run: RunInfo) -> None:
        """Begin a strategy."""
        self._board.begin(run)

    def position(self) -> dict[str, Any]:
        """Return what was gathered since the last table, and what that table showed."""
        return {name: plain(value) for name, value in self._board.position().items()}

    def resume(self, run: RunInfo, position: Mapping[str, Any]) -> None:
        """Go on gathering for the next table."""
        self._board.resume(run, position)

    def emit(self, metrics: Mapping[str, Any], epoch: int, hook_point: HookPoint, *, step: int) -> None:
        """Gather metrics."""
        if self._board.run is None:
            raise RuntimeError("ConsoleSink shows the metrics of a run: set_run_context(run) comes before emit.")
        self._board.take(metrics, epoch, step)

    def snapshot(self, epoch: int, step: int) -> None:
        """Show what was gathered."""
        self._board.epoch, self._board.step = epoch, step
        self._show()

    def close(self, status: str) -> None:
        """Show what was gathered since the last table."""
        self._show()
        self._board.run = None

    def _show(self) -> None:
        run, news = self._board.run, self._board.news()
        if run is None or not news:
            return
        title = f"{run.experiment}  {run.strategy}  epoch {self._board.epoch}  step {self._board.step:,}"
        if self._console.is_interactive:
            self._console.print(Rule(Text(title, style="bold"), align="left", style="dim"), self._table(news))
        else:
            hooks = self._board.by_hook({name: Cell(name, track.whole()) for name, track in news.items()})
            for line in [title, *(f"  {hook.heading}: {_joined(hook.cells)}" for hook in hooks)]:
                self._console.out(line, highlight=False)
        for track in news.values():
            track.is_told()

    def _table(self, news: Mapping[str, Track]) -> Lines:
        cells = {name: Cell(name, track.mean(), track.arrow, track.rank()) for name, track in news.items()}
        live, others = self._board.groups(cells)
        head = list(group_lines(live, self._console.width))
        lines, shown = fitted(others, self._console.width, max(LEAST_LINES, self._console.height - len(head) - 3))
        total = sum(len(group.cells) for group in others)
        remarks = [f"{total - shown:,} more in the files of --hook-jsonl or --hook-csv"] * (shown < total)
        remarks += [f"{MEAN}mean since the last table"] * any(track.count for track in news.values())
        return Lines([*head, *lines, *([[("; ".join(remarks), "dim")]] if remarks else [])])


def _joined(cells: Sequence[Cell]) -> str:
    return ", ".join(f"{cell.name} {cell.text}" for cell in cells)


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
