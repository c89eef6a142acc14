"""The progress of one strategy: a bar on a terminal, a line now and then elsewhere, at most twice a second."""

import math
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from typing import Any, Protocol

from rich.cells import cell_len
from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ..errors import told
from ..hooks import HookPoint, MetricSink, RunInfo, Series
from ..state import LoopState
from .board import flattened
from .notebook import NotebookOutput
from .text import duration_text, number_text, printable, rate_text

SECONDS_BETWEEN_UPDATES = 0.5
SECONDS_OF_PACE = 30.0
SECONDS_BETWEEN_LINES, SHARE_BETWEEN_LINES = 30.0, 0.0999
SECONDS_BESIDE_SNAPSHOTS = 300.0
SHORTEST_BAR, LONGEST_BAR = 8, 40
LEAST_IMPORTANT = ("epoch", "count", "rate")
# What gives way first where the experiment chose numbers to be shown.
LEAST_BESIDE_CHOSEN = ("rate", "percent", "left", "total")


@dataclass(frozen=True)
class Position:
    """How far a strategy has come, at one moment."""

    unit: str
    done: float
    total: int  # 0 where nobody knows it
    rate: float | None  # units per second over the last half minute; None before anything is known
    numbers: dict[str, float]
    took: float | None = None  # seconds from the first step to the last, once the strategy is over
    epoch: float | None = None  # passes over the data, where those are not the unit
    # What the experiment wants to be said, by label; it takes the place of numbers of that name.
    chosen: Mapping[str, str] = field(default_factory=dict)

    @property
    def share(self) -> float:
        """The finished part of the run, 0 to 1."""
        return min(1.0, self.done / self.total) if self.total else 0.0

    def parts(self) -> dict[str, str]:
        """Return what there is to say, by topic, in the order in which it is shown."""
        parts = {"percent": f"{self.share * 100:.0f}%", "count": f"{self.unit} {int(self.done):,}/{self.total:,}"}
        if not self.total:
            parts = {"count": f"{self.unit} {int(self.done):,}"}
        if self.epoch is not None:
            parts["epoch"] = f"epoch {self.epoch:.1f}"
        if self.rate:
            parts["rate"] = rate_text(self.rate, self.unit)
        if self.took is not None:
            parts["left"] = f"in {duration_text(self.took)}"
        elif self.rate and self.total:
            parts["left"] = duration_text((self.total - self.done) / self.rate) + " left"
        numbers = {name: f"{printable(name)} {number_text(value)}" for name, value in self.numbers.items()}
        return parts | {f"number {name}": text for name, text in {**numbers, **self.chosen}.items()}

    def fitted(self, room: int) -> str:
        """Return as much of that on one line as ``room`` columns hold: the least important gives way, then the last.

        The topic ``total`` is the end of the count.

        >>> Position("epoch", 1, 20, None, {"loss": 1.5}).fitted(15)
        '5%  loss 1.5'
        >>> Position("step", 1, 20, None, {}, chosen={"over": "over 0.5"}).fitted(20)
        'step 1/20  over 0.5'
        """
        parts = self.parts()
        for topic in (*(LEAST_BESIDE_CHOSEN if self.chosen else LEAST_IMPORTANT), *reversed(list(parts))):
            if len("  ".join(parts.values())) <= room or len(parts) == 1:
                break
            if topic == "total":
                parts["count"] = parts["count"].partition("/")[0]
            parts.pop(topic, None)
        return "  ".join(parts.values())


class View(Protocol):
    """Where a position is shown."""

    def show(self, position: Position) -> None:
        """Show a position."""

    def finish(self, position: Position | None) -> None:
        """Show the last position, if any, and clean up."""


class BarView:
    """A bar at the foot of a terminal, where ``transient`` ones vanish in the end, or in an output of a cell."""

    def __init__(self, console: Console, label: str, *, transient: bool) -> None:
        self._console, self._label = console, label
        empty = progress_line(None, console.width, label)
        self._live = Live(empty, console=console, auto_refresh=False, transient=transient)
        self._draw: Callable[[Table], None] = partial(self._live.update, refresh=True)
        if console.is_jupyter:
            self._draw = NotebookOutput(console).update
        else:
            self._live.start(refresh=True)

    def show(self, position: Position) -> None:
        """Draw the bar anew."""
        self._draw(progress_line(position, self._console.width, self._label))

    def finish(self, position: Position | None) -> None:
        """Give the terminal back."""
        if position is not None:
            self.show(position)
        self._live.stop()


def progress_line(position: Position | None, width: int, label: str = "") -> Table:
    """Return a line of ``width`` columns: a label, a bar, and as much as fits of what there is to say beside it."""
    room = width - cell_len(label) - bool(label) - 1
    tail = position.fitted(room - SHORTEST_BAR) if position else ""
    long = max(1, min(LONGEST_BAR, room - cell_len(tail))) if position else SHORTEST_BAR
    bar = ProgressBar(1.0, position.share if position else 0.0, long)
    line = Table.grid(padding=(0, 1, 0, 0))
    line.add_row(*([Text(label, "bold")] if label else []), bar, Text(tail, no_wrap=True))
    return line


class LineView:
    """A plain line a tenth of the run or half a minute after the last line, for pipes and log files."""

    def __init__(self, console: Console, label: str, *, transient: bool, clock: Callable[[], float]) -> None:
        self._console, self._label = console, label
        self._transient, self._clock = transient, clock
        self._share = self._time = 0.0
        self._is_told = True
        self._between = (SHARE_BETWEEN_LINES, SECONDS_BETWEEN_LINES)

    def show(self, position: Position) -> None:
        """Print a line if one is due."""
        now, told = self._clock(), self._is_told
        share, seconds = self._between
        if told or position.share - self._share > share or now - self._time >= seconds:
            self._share, self._time, self._is_told = int(position.share * 10) / 10, now, False
            if not told:
                self._print(position)

    def told(self) -> None:
        """Take note of the line of a SNAPSHOT: from now on only five minutes without any call for one."""
        self._is_told, self._between = True, (math.inf, SECONDS_BESIDE_SNAPSHOTS)

    def finish(self, position: Position | None) -> None:
        """Print the last position, which is left to whoever reports the result where the view is transient."""
        if position is not None and not self._transient:
            self._print(position)

    def _print(self, position: Position) -> None:
        self._console.out(f"{self._label}: " + ", ".join(position.parts().values()), highlight=False)


@dataclass
class TrainingProgress:
    """Tells a view, at most twice a second, where a loop is; in between a call costs one look at the clock.

    A view that fails, because the pipe behind it is closed for example, is told nothing more; the loop goes on.
    """

    view: View
    _: KW_ONLY
    unit: str  # of the loop, "epoch" or "step"
    length: int  # units in the whole run
    clock: Callable[[], float]
    steps_per_epoch: int | None = None  # without it a loop of steps says nothing of passes over the data
    chosen: Callable[[], Mapping[str, str]] = dict  # what the experiment wants to be said, by label

    def __post_init__(self) -> None:
        """Begin to measure the time."""
        self._begin = self._due = self.clock()
        self._pace: deque[tuple[float, float]] = deque()  # moments of the last half minute, and what was done by then
        self._loop: LoopState | None = None

    def step(self, loop: LoopState) -> None:
        """Note that a step or an evaluation is done."""
        now = self.clock()
        if now >= self._due:
            self._loop = loop
            self._tell(lambda: self.view.show(self._position(loop, now)))

    evaluated = step

    def stop(self) -> None:
        """Show where the loop stands and finish the view."""
        loop, self._loop = self._loop, None
        now = self.clock()
        last = None if loop is None else replace(self._position(loop, now), took=now - self._begin)
        self._tell(lambda: self.view.finish(last))

    def _tell(self, action: Callable[[], None]) -> None:
        self._due = math.inf  # where the view fails it stays so, and nothing is due again
        try:
            action()
            self._due = self.clock() + SECONDS_BETWEEN_UPDATES
        except Exception as error:
            warnings.warn(f"The progress display failed and is switched off: {told(error)}", stacklevel=2)

    def _position(self, loop: LoopState, now: float) -> Position:
        epochs = loop.step / self.steps_per_epoch if self.steps_per_epoch else None
        done = loop.step if self.unit == "step" else loop.epoch if epochs is None else epochs
        self._pace.append((now, done))
        while len(self._pace) > 2 and self._pace[1][0] <= now - SECONDS_OF_PACE:
            self._pace.popleft()
        begin, before = self._pace[0]
        rate = (done - before) / (now - begin) if now > begin else None
        chosen, epoch = self.chosen(), epochs if self.unit == "step" else None
        numbers = newest_numbers(loop, with_evaluation=not chosen)
        return Position(self.unit, done, self.length, rate, numbers, epoch=epoch, chosen=chosen)


def newest_numbers(loop: LoopState, *, with_evaluation: bool = True) -> dict[str, float]:
    """Return the newest mean loss and, of the evaluation, the validation accuracy or else its first number."""
    numbers = {} if loop.epoch_loss is None else {"loss": loop.epoch_loss}
    names = ["val_acc"] if "val_acc" in loop.evaluation else list(loop.evaluation)[:1]
    return numbers | {name: loop.evaluation[name] for name in names if with_evaluation}


class ProgressNumbers(MetricSink):
    """Keep what was delivered last of some metrics; of a series its mean, as the loss beside it is one."""

    name = "progress"
    keeps = False

    def __init__(self, metrics: Mapping[str, Sequence[str]]) -> None:
        self.metrics = metrics  # full names by label
        self._wanted = {name for names in metrics.values() for name in names}
        self._newest: dict[str, float] = {}

    def set_run_context(self, run: RunInfo) -> None:
        """Begin a strategy: its values are its own."""
        self._newest.clear()

    def emit(self, metrics: Mapping[str, Any], epoch: int, hook_point: HookPoint, *, step: int) -> None:
        """Note the numbers that are wanted."""
        for name, value in flattened(metrics):
            if name in self._wanted:
                values = value.values if isinstance(value, Series) else [float(value)]
                self._newest[name] = sum(values) / len(values)

    def texts(self) -> dict[str, str]:
        """Return what there is to say, by label; nothing under a label of which a value is missing.

        Several values under one label have two significant digits each, so that a line holds them.

        >>> numbers = ProgressNumbers({"overflow": ["h/elements", "h/tensors"], "other": ["h/other"]})
        >>> numbers.emit({"h/elements": 0.25, "h/tensors": Series([1, 2], [1.0, 0.0])}, 0, HookPoint.POST_STEP, step=2)
        >>> numbers.texts()
        {'overflow': 'overflow 0.25/0.5'}
        """
        texts = {}
        for label, names in self.metrics.items():
            values = [self._newest[name] for name in names if name in self._newest]
            if len(values) == len(names):
                shown = [number_text(*values)] if len(values) == 1 else [f"{value:.2g}" for value in values]
                texts[label] = f"{printable(label)} {'/'.join(shown)}"
        return texts
