"""The newest metrics as one table at every SNAPSHOT."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, ClassVar

from rich.console import Console
from rich.rule import Rule
from rich.text import Text

from framework.console_output import make_console
from framework.contexts import RunInfo
from framework.hook_points import HookPoint
from framework.metrics import MetricSink, Series
from framework.number_text import value_text
from framework.registry import SinkRegistry

INDENT = COLUMN_GAP = 2
BLOCK_GAP = 4
MOST_BLOCKS = 4
SHORTEST_PIECE = 8
NARROWEST_VALUE = 10


@dataclass(frozen=True)
class Group:
    """The metrics of one hook, as (name, text)."""

    heading: str
    metrics: Sequence[tuple[str, str]]


@dataclass
class Summary:
    """A series as far as it has come since the last table: its last value, and its mean over ``count`` numbers."""

    last: Any = None
    total: float = 0.0
    count: int = 0

    def extend(self, series: Series) -> None:
        """Take in further values."""
        self.last = series.values[-1]
        numbers = [value for value in series.values if isinstance(value, (int, float))]
        self.total += sum(numbers)
        self.count += len(numbers)

    def text(self) -> str:
        """Return ``last / mean (count)``."""
        last = value_text(self.last)
        return f"{last} / {value_text(self.total / self.count)} ({self.count})" if self.count else last


@SinkRegistry.register
class ConsoleSink(MetricSink):
    """Show the newest metrics as a table at every SNAPSHOT.

    Metrics are gathered from every point and shown together, per-parameter ones (three or more parts of a path) left
    out. A series is shown as ``last / mean (number of values)`` since the last table. What is left at the end of a
    strategy is shown then. Where there is no terminal the table is plain lines, one for each hook.
    """

    name: ClassVar[str] = "console"

    def __init__(self, *, console: Console | None = None) -> None:
        self._console = console or make_console()
        self._run: RunInfo | None = None
        self._gathered: dict[str, Any] = {}
        self._position = (0, 0)

    def set_run_context(self, run: RunInfo) -> None:
        """Begin a strategy."""
        self._run = run
        self._gathered = {}

    def emit(self, metrics: Mapping[str, Any], epoch: int, hook_point: HookPoint, *, step: int) -> None:
        """Gather metrics."""
        if self._run is None:
            raise RuntimeError("ConsoleSink shows the metrics of a run: set_run_context(run) comes before emit.")
        self._position = (epoch, step)
        for name, value in metrics.items():
            if name.count("/") < 2:
                self._gather(name, value)

    def snapshot(self, epoch: int, step: int) -> None:
        """Show what was gathered."""
        self._position = (epoch, step)
        if self._run is not None:
            self._show(self._run)

    def close(self, status: str) -> None:
        """Show what was gathered since the last table."""
        if self._run is not None:
            self._show(self._run)
        self._run = None

    def _gather(self, name: str, value: Any) -> None:
        if not isinstance(value, Series):
            self._gathered[name] = value
            return
        summary = self._gathered.get(name)
        if not isinstance(summary, Summary):
            summary = self._gathered[name] = Summary()
        summary.extend(value)

    def _show(self, run: RunInfo) -> None:
        if not self._gathered:
            return
        epoch, step = self._position
        title = f"{run.experiment}  {run.strategy}  epoch {epoch}  step {step:,}"
        has_series = any(isinstance(value, Summary) for value in self._gathered.values())
        groups = grouped(self._gathered, run.metric_infos)
        self._gathered = {}
        if not self._console.is_interactive:
            for line in plain_lines(title, groups):
                self._console.out(line, highlight=False)
            return
        self._console.print(Rule(Text(title, style="bold"), align="left", style="dim"))
        self._console.print(metric_lines(groups, self._console.width), highlight=False)
        if has_series:
            self._console.print(Text("of every step: last / mean (number of values)", style="dim"))


def grouped(gathered: Mapping[str, Any], described: Iterable[str] = ()) -> list[Group]:
    """Sort metrics by hook, hooks in the order in which their metrics were described, and make their values text."""
    by_hook: dict[str, list[tuple[str, str]]] = {name.partition("/")[0]: [] for name in described}
    for name, value in gathered.items():
        hook, _, metric = name.partition("/")
        text = value.text() if isinstance(value, Summary) else value_text(value)
        by_hook.setdefault(hook, []).append((metric or hook, text))
    return [Group(hook, metrics) for hook, metrics in by_hook.items() if metrics]


def plain_lines(title: str, groups: Sequence[Group]) -> Iterable[str]:
    """Yield the title and one line for each hook."""
    yield title
    for group in groups:
        yield f"  {group.heading}: " + ", ".join(f"{metric} {text}" for metric, text in group.metrics)


def metric_lines(groups: Sequence[Group], width: int) -> Text:
    """Lay the groups out in as many blocks side by side as ``width`` columns hold.

    Made of lines rather than nested tables, whose measuring would cost tens of milliseconds.
    """
    for most in range(MOST_BLOCKS, 0, -1):
        blocks = balanced(in_pieces(groups, most), most)
        widths = [_width(block) for block in blocks]
        if sum(widths) + BLOCK_GAP * (len(blocks) - 1) <= width:
            break
    columns = [list(_block_lines(block, min(wide, width))) for block, wide in zip(blocks, widths, strict=True)]
    rows = []
    for cells in zip_longest(*columns, fillvalue=Text()):
        row = Text()
        for cell, wide in zip(cells, widths, strict=True):
            row.append_text(cell).append(" " * (wide + BLOCK_GAP - len(cell)))
        row.rstrip()
        rows.append(row)
    return Text("\n").join(rows)


def _names_width(block: Sequence[Group]) -> int:
    return INDENT + max(len(metric) for group in block for metric, _ in group.metrics)


def _width(block: Sequence[Group]) -> int:
    values = max(len(text) for group in block for _, text in group.metrics)
    return max(_names_width(block) + COLUMN_GAP + values, *(len(group.heading) for group in block))


def _block_lines(block: Sequence[Group], width: int) -> Iterator[Text]:
    """Yield the lines of one block, values that are too long folded under themselves."""
    begin = _names_width(block) + COLUMN_GAP
    room = max(width - begin, NARROWEST_VALUE)
    for group in block:
        yield Text(group.heading, style="bold cyan")
        for metric, text in group.metrics:
            pieces = [text[start : start + room] for start in range(0, len(text), room)] or [""]
            yield Text(f"{' ' * INDENT + metric:{begin}}{pieces[0]}")
            yield from (Text(" " * begin + piece) for piece in pieces[1:])


def in_pieces(groups: Sequence[Group], blocks: int) -> list[Group]:
    """Cut groups that are longer than an even share of ``blocks`` blocks.

    >>> [(piece.heading, len(piece.metrics)) for piece in in_pieces([Group("a", [("x", "1")] * 20)], 2)]
    [('a', 10), ('a (continued)', 10)]
    """
    share = max(SHORTEST_PIECE, -(-sum(len(group.metrics) for group in groups) // blocks))
    return [
        Group(group.heading + (" (continued)" if begin else ""), group.metrics[begin : begin + share])
        for group in groups
        for begin in range(0, len(group.metrics), share)
    ]


def balanced(groups: Sequence[Group], most: int) -> list[list[Group]]:
    """Divide the groups, in order, into at most ``most`` blocks, the tallest as low as can be.

    >>> groups = [Group("a", [("x", "1")] * 4), Group("b", [("x", "1")] * 2), Group("c", [("x", "1")])]
    >>> [[group.heading for group in block] for block in balanced(groups, 2)]
    [['a'], ['b', 'c']]
    """
    limit = max(len(group.metrics) + 1 for group in groups)
    while len(blocks := _filled(groups, limit)) > most:
        limit += 1
    return blocks


def _filled(groups: Sequence[Group], limit: int) -> list[list[Group]]:
    blocks: list[list[Group]] = []
    height = limit
    for group in groups:
        if height + len(group.metrics) + 1 > limit:
            blocks.append([])
            height = 0
        blocks[-1].append(group)
        height += len(group.metrics) + 1
    return blocks
