"""Progress of one strategy: a bar on a terminal, occasional lines elsewhere, at most twice a second."""

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.jupyter import JupyterMixin
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.segment import Segments
from rich.table import Table
from rich.text import Text

from ..doctor import RecentLosses
from ..errors import describe_error, warn
from ..hooks import HookPoint, MetricSink, Series
from .board import flattened
from .text import duration_text, number_text, printable, rate_text

if TYPE_CHECKING:
    from ..hooks import RunInfo
    from ..state import LoopState

SECONDS_BETWEEN_UPDATES = 0.5
SECONDS_OF_PACE = 30.0
SECONDS_BETWEEN_LINES, SHARE_BETWEEN_LINES = 30.0, 0.0999
SECONDS_WITH_SNAPSHOTS = 300.0
SHORTEST_BAR, LONGEST_BAR = 8, 40
LEAST_IMPORTANT = ("epoch", "count", "rate")
# Topics to omit first if the experiment chose numbers to show.
LEAST_WITH_CHOSEN = ("rate", "percent", "left", "total")


@dataclass(frozen=True)
class Position:
    """The position of a strategy at one moment."""

    unit: str
    done: float
    total: int  # 0 if unknown
    rate: float | None  # units per second over the last half minute; None if unknown
    numbers: dict[str, float]
    took: float | None = None  # seconds from the first step to the last, after the strategy has ended
    epoch: float | None = None  # passes over the data, if those are not the unit
    # Texts that the experiment shows, by label; they replace numbers of that name.
    chosen: Mapping[str, str] = field(default_factory=dict)

    @property
    def share(self) -> float:
        """The finished part of the run, 0 to 1."""
        return min(1.0, self.done / self.total) if self.total else 0.0

    def parts(self) -> dict[str, str]:
        """Return the texts by topic, in display order."""
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
        """Return the texts that fit into ``room`` columns; the least important topics are omitted, then the last.

        The topic ``total`` is the second part of the count.

        >>> Position("epoch", 1, 20, None, {"loss": 1.5}).fitted(15)
        '5%  loss 1.5'
        >>> Position("step", 1, 20, None, {}, chosen={"over": "over 0.5"}).fitted(20)
        'step 1/20  over 0.5'
        """
        parts = self.parts()
        for topic in (*(LEAST_WITH_CHOSEN if self.chosen else LEAST_IMPORTANT), *reversed(list(parts))):
            if len("  ".join(parts.values())) <= room or len(parts) == 1:
                break
            if topic == "total":
                parts["count"] = parts["count"].partition("/")[0]
            parts.pop(topic, None)
        return "  ".join(parts.values())


class View(Protocol):
    """A view of positions."""

    def show(self, position: Position) -> None:
        """Show a position."""

    def finish(self, position: Position | None) -> None:
        """Show the last position, if any, and clean up."""


class NotebookOutput(JupyterMixin):
    """One output of the running cell, which shows its newest content."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._shown: RenderableType = ""
        self._handle: Any = None

    def __rich__(self) -> RenderableType:
        """Return the content."""
        return self._shown

    def update(self, shown: RenderableType) -> None:
        """Replace the content."""
        from IPython.display import display

        self._shown = Segments(self._console.render(shown))  # with control characters escaped
        if self._handle is None:
            self._handle = display(self, display_id=True)  # type: ignore[no-untyped-call]
        else:
            self._handle.update(self)


class BarView:
    """A bar at the bottom of a terminal, removed at the end if ``transient``, or in the output of a cell."""

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
        """Redraw the bar."""
        self._draw(progress_line(position, self._console.width, self._label))

    def finish(self, position: Position | None) -> None:
        """Draw the last position and release the terminal."""
        if position is not None:
            self.show(position)
        self._live.stop()


def progress_line(position: Position | None, width: int, label: str = "") -> Table:
    """Return a line of ``width`` columns: a label, a bar, and the texts that fit."""
    room = width - cell_len(label) - bool(label) - 1
    tail = position.fitted(room - SHORTEST_BAR) if position else ""
    long = max(1, min(LONGEST_BAR, room - cell_len(tail))) if position else SHORTEST_BAR
    bar = ProgressBar(1.0, position.share if position else 0.0, long)
    line = Table.grid(padding=(0, 1, 0, 0))
    line.add_row(*([Text(label, "bold")] if label else []), bar, Text(tail, no_wrap=True))
    return line


class LineView:
    """A plain line after every tenth of the run or half a minute, for pipes and log files."""

    def __init__(self, console: Console, label: str, *, transient: bool, clock: Callable[[], float]) -> None:
        self._console, self._label = console, label
        self._transient, self._clock = transient, clock
        self._share = self._time = 0.0
        self._line_shown = True
        self._between = (SHARE_BETWEEN_LINES, SECONDS_BETWEEN_LINES)

    def show(self, position: Position) -> None:
        """Print a line if one is due."""
        now, line_shown = self._clock(), self._line_shown
        share, seconds = self._between
        if line_shown or position.share - self._share > share or now - self._time >= seconds:
            self._share, self._time, self._line_shown = int(position.share * 10) / 10, now, False
            if not line_shown:
                self._print(position)

    def snapshot_shown(self) -> None:
        """Note that a SNAPSHOT printed a line: from now on a line is due only after five minutes without any."""
        self._line_shown, self._between = True, (math.inf, SECONDS_WITH_SNAPSHOTS)

    def finish(self, position: Position | None) -> None:
        """Print the last position, unless the view is transient: then the result line follows."""
        if position is not None and not self._transient:
            self._print(position)

    def _print(self, position: Position) -> None:
        self._console.out(f"{self._label}: " + ", ".join(position.parts().values()), highlight=False)


@dataclass
class TrainingProgress:
    """Updates a view with the position of a loop at most twice a second; other calls only read the clock.

    A view that fails, for example because of a broken pipe, is disabled; the loop continues.
    """

    view: View
    _: KW_ONLY
    unit: str  # of the loop, "epoch" or "step"
    length: int  # units in the whole run
    clock: Callable[[], float]
    steps_per_epoch: int | None = None  # without it a step loop does not show epochs
    chosen: Callable[[], Mapping[str, str]] = dict  # texts that the experiment shows, by label
    losses: RecentLosses = field(default_factory=RecentLosses)

    def __post_init__(self) -> None:
        """Start the clock."""
        self._begin = self._due = self.clock()
        self._pace: deque[tuple[float, float]] = deque()  # times of the last half minute, with the units done by then
        self._loop: LoopState | None = None

    def step(self, loop: "LoopState") -> None:
        """Record the end of a step or an evaluation."""
        now = self.clock()
        if now >= self._due:
            self._loop = loop
            with self._disabled_on_failure():
                self.view.show(self._position(loop, now))

    report_evaluation = step

    def stop(self) -> None:
        """Show the last position and finish the view."""
        loop, self._loop = self._loop, None
        now = self.clock()
        last = None if loop is None else replace(self._position(loop, now), took=now - self._begin)
        with self._disabled_on_failure():
            self.view.finish(last)

    @contextmanager
    def _disabled_on_failure(self) -> Iterator[None]:
        """Disable the view, with a warning, if the body fails."""
        self._due = math.inf
        try:
            yield
            self._due = self.clock() + SECONDS_BETWEEN_UPDATES
        except Exception as error:
            warn(f"The progress display failed and is disabled: {describe_error(error)}", stacklevel=3)

    def _position(self, loop: "LoopState", now: float) -> Position:
        epochs = loop.step / self.steps_per_epoch if self.steps_per_epoch else None
        done = loop.step if self.unit == "step" else loop.epoch if epochs is None else epochs
        self._pace.append((now, done))
        while len(self._pace) > 2 and self._pace[1][0] <= now - SECONDS_OF_PACE:
            self._pace.popleft()
        start, done_at_start = self._pace[0]
        rate = (done - done_at_start) / (now - start) if now > start else None
        chosen, epoch = self.chosen(), epochs if self.unit == "step" and epochs and epochs >= 1 else None
        epochs_begun = 0 if self.unit == "step" else max(1, loop.epoch)
        numbers = newest_numbers(loop, self.losses, epochs_begun, with_evaluation=not chosen)
        return Position(self.unit, done, self.length, rate, numbers, epoch=epoch, chosen=chosen)


def newest_numbers(
    loop: "LoopState", losses: RecentLosses, epochs: int = 1, *, with_evaluation: bool = True
) -> dict[str, float]:
    """Return the newest loss, and the validation accuracy or else the first number of the evaluation.

    The loss is that of a summary that is written now: the mean of the last epoch or of the newest steps whose metrics
    are delivered. Before the first delivery it is that of the newest step.

    Args:
        loop: the position of the run.
        losses: the losses of the newest steps.
        epochs: as for :meth:`.RecentLosses.final_loss`.
        with_evaluation: return the number of the evaluation, too.
    """
    is_partial = loop.running_loss is not None
    loss = losses.final_loss(losses.newest_step, loop.epoch_loss, epochs, is_partial=is_partial)["training_loss"]
    from torch import Tensor  # here, since readers of records import this module

    if loss is None and type(loop.loss) is Tensor:  # other classes may wait for other ranks
        loss = loop.loss.item()  # waits for the device, at most twice a second
    numbers = {} if loss is None else {"loss": loss}
    names = ["val_acc"] if "val_acc" in loop.evaluation else list(loop.evaluation)[:1]
    return numbers | {name: loop.evaluation[name] for name in names if with_evaluation}


class ProgressNumbers(MetricSink):
    """Stores the newest values of some metrics, of a series its mean, and the losses of the newest steps."""

    draws: ClassVar[bool] = False
    name = "progress"
    keeps = False

    def __init__(self, metrics: Mapping[str, Sequence[str]]) -> None:
        self.metrics = metrics  # full names by label
        self._wanted = {name for names in metrics.values() for name in names}
        self._newest: dict[str, float] = {}
        self.losses = RecentLosses()

    def set_run_context(self, run: "RunInfo") -> None:
        """Start a strategy without values."""
        self._newest.clear()
        self.losses.clear()

    def emit(self, metrics: Mapping[str, Any], epoch: int, hook_point: HookPoint, *, step: int) -> None:
        """Store the values of the selected metrics, and losses of steps."""
        self.losses.add(metrics)
        for name, value in flattened(metrics):
            if name in self._wanted:
                values = value.values if isinstance(value, Series) else [float(value)]
                self._newest[name] = sum(values) / len(values)

    def texts(self) -> dict[str, str]:
        """Return the texts by label; a label with a missing value is omitted.

        Several values under one label have two significant digits each, so that they fit on a line.

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
