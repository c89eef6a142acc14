"""The newest metrics as one table at every SNAPSHOT."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from loopscope.console import (
    ARROW_STYLES,
    HEADING_STYLE,
    Board,
    Cell,
    Group,
    Groups,
    Line,
    as_text,
    brief,
    fitted,
    flattened,
    hooks_described,
    make_console,
    number_text,
    parted,
    printable,
    shown_metrics,
    value_text,
    width_of,
)
from loopscope.hooks import HookPoint, MetricSink, RunInfo, Series, SinkRegistry
from rich.console import Console
from rich.rule import Rule
from rich.text import Text

from .record import plain

ITEM_GAP = 3
LEAST_LINES = 30
MEAN = "ø "


@dataclass
class Summary:
    """A metric since the last table: its last value, and for a series its mean over ``count`` numbers."""

    last: Any = None
    total: float = 0.0
    count: int = 0

    def add(self, value: Any) -> None:
        """Take in a value, or further values of a series."""
        if not isinstance(value, Series):
            self.last, self.count = value, 0
            return
        self.last = value.values[-1]
        numbers = [item for item in value.values if isinstance(item, (int, float))]
        self.total += sum(numbers)
        self.count += len(numbers)

    def text(self) -> str:
        """Return the value, of a series ``last / mean (count)``."""
        last = value_text(self.last)
        return f"{last} / {value_text(self.total / self.count)} ({self.count})" if self.count else last

    def brief(self) -> str:
        """Return the value, of a series the mean, in at most twenty columns."""
        return MEAN + number_text(self.total / self.count) if self.count else brief(self.last)


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
        self._run: RunInfo | None = None
        self._gathered: dict[str, Summary] = {}
        self._before: dict[str, str] = {}

    def set_run_context(self, run: RunInfo) -> None:
        """Begin a strategy."""
        self._run = run
        self._board.begin(run)
        self._gathered, self._before = {}, {}

    def position(self) -> dict[str, Any]:
        """Return what was gathered since the last table, and what that table showed."""
        gathered = {name: asdict(summary) for name, summary in self._gathered.items()}
        found = {"board": self._board.position(), "gathered": gathered, "before": self._before}
        return {name: plain(value) for name, value in found.items()}

    def resume(self, run: RunInfo, position: Mapping[str, Any]) -> None:
        """Go on gathering for the next table."""
        self._run = run
        self._board.resume(run, position["board"])
        self._gathered = {name: Summary(**summary) for name, summary in position["gathered"].items()}
        self._before = dict(position["before"])

    def emit(self, metrics: Mapping[str, Any], epoch: int, hook_point: HookPoint, *, step: int) -> None:
        """Gather metrics."""
        if self._run is None:
            raise RuntimeError("ConsoleSink shows the metrics of a run: set_run_context(run) comes before emit.")
        self._board.take(metrics, epoch, step)
        for name, value in flattened(shown_metrics(metrics, self._board.live_names)):
            self._gathered.setdefault(name, Summary()).add(value)

    def snapshot(self, epoch: int, step: int) -> None:
        """Show what was gathered."""
        self._board.epoch, self._board.step = epoch, step
        if self._run is not None:
            self._show(self._run)

    def close(self, status: str) -> None:
        """Show what was gathered since the last table."""
        if self._run is not None:
            self._show(self._run)
        self._run = None

    def _show(self, run: RunInfo) -> None:
        if not self._gathered:
            return
        title = f"{run.experiment}  {run.strategy}  epoch {self._board.epoch}  step {self._board.step:,}"
        gathered, self._gathered = self._gathered, {}
        if not self._console.is_interactive:
            for line in plain_lines(title, by_hook(gathered, run)):
                self._console.out(line, highlight=False)
            return
        self._console.print(Rule(Text(title, style="bold"), align="left", style="dim"))
        table = as_text(self._table(gathered, run))
        self._console.print(table, highlight=False, no_wrap=True, overflow="ellipsis")

    def _table(self, gathered: Mapping[str, Summary], run: RunInfo) -> list[Line]:
        width, height = self._console.width, self._console.height
        live, others = parted(self._cells(gathered), self._board.live_metrics, run)
        head = list(group_lines(live, width))
        total = sum(len(group.metrics) for group in others)
        table, shown = fitted(others, width, max(LEAST_LINES, height - len(head) - 3))
        remarks = [f"{total - shown} more in the files of --hook-jsonl or --hook-csv"] * (shown < total)
        remarks += [f"{MEAN}mean since the last table"] * any(summary.count for summary in gathered.values())
        return [*head, *table, *([[("; ".join(remarks), "dim")]] if remarks else [])]

    def _cells(self, gathered: Mapping[str, Summary]) -> dict[str, Cell]:
        """Make a cell of everything gathered, and remember it to tell next time what has changed."""
        before, self._before = self._before, self._before | {name: value.brief() for name, value in gathered.items()}
        tracks = self._board.tracks
        return {
            name: Cell(name, self._before[name], tracks[name].arrow, _rank(value.last, before.get(name), value.brief()))
            for name, value in gathered.items()
        }


def _rank(value: Any, before: str | None, now: str) -> int:
    """Return 0 for a number that has changed, 1 for a list, 2 for what stood still."""
    return 2 if before == now else int(isinstance(value, (list, tuple)))


def group_lines(groups: Sequence[Group], width: int) -> Iterable[Line]:
    """Yield each group on a line of its own, headings in one column, what does not fit on further lines."""
    begin = max((len(group.heading) for group in groups), default=0) + ITEM_GAP
    for group in groups:
        line: Line = [(f"{printable(group.heading):{begin}}", HEADING_STYLE)]
        for index, cell in enumerate(group.metrics):
            item = [(f"{printable(cell.name)} ", ""), (cell.text, "bold")]
            item += [(f" {cell.arrow}", ARROW_STYLES[cell.arrow])] if cell.arrow else []
            if index and width_of(line) + ITEM_GAP + width_of(item) > width:
                yield line
                line = [(" " * begin, "")]
            elif index:
                line.append((" " * ITEM_GAP, ""))
            line += item
        yield line


def by_hook(gathered: Mapping[str, Summary], run: RunInfo) -> dict[str, list[tuple[str, str]]]:
    """Sort metrics by hook, hooks in the order in which their metrics were described, and make their values text."""
    hooks: dict[str, list[tuple[str, str]]] = {name: [] for name in hooks_described(run)}
    for name, summary in gathered.items():
        hook, _, metric = name.partition("/")
        hooks.setdefault(hook, []).append((metric or hook, summary.text()))
    return {hook: metrics for hook, metrics in hooks.items() if metrics}


def plain_lines(title: str, hooks: Mapping[str, Sequence[tuple[str, str]]]) -> Iterable[str]:
    """Yield the title and one line for each hook."""
    yield title
    for hook, metrics in hooks.items():
        yield f"  {hook}: " + ", ".join(f"{metric} {text}" for metric, text in metrics)
