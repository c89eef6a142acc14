"""The progress of one strategy: a bar on a terminal, a line now and then elsewhere, at most twice a second."""

import math
import warnings
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as RichProgress

from ..state import LoopState
from .text import duration_text, number_text, rate_text

SECONDS_BETWEEN_UPDATES = 0.5
SECONDS_OF_PACE = 30.0
SECONDS_BETWEEN_LINES = 30.0
SHORTEST_BAR, LONGEST_BAR = 8, 40
LEAST_IMPORTANT = ("epoch", "count", "rate")
LEAST_BESIDE_CHOSEN = ("rate", "percent", "left", "total")
"""What gives way first where the experiment chose numbers to be shown."""


@dataclass(frozen=True)
class Position:
    """How far a strategy has come, at one moment."""

    unit: str
    done: float
    total: int
    rate: float | None
    """Units per second over the last half minute; ``None`` before anything is known."""
    numbers: dict[str, float]
    took: float | None = None
    """Seconds from the first step to the last, once the strategy is over."""
    epoch: float | None = None
    """Passes over the data, where those are not the unit."""
    chosen: Mapping[str, str] = field(default_factory=dict)
    """What the experiment wants to be said, by label; it takes the place of numbers of that name."""

    @property
    def share(self) -> float:
        """The finished part of the run, 0 to 1."""
        return min(1.0, self.done / self.total) if self.total else 1.0

    def parts(self) -> dict[str, str]:
        """Return what there is to say, by topic, in the order in which it is shown."""
        parts = {
            "percent": f"{self.share * 100:.0f}%",
            "count": f"{self.unit} {int(self.done):,}/{self.total:,}",
        }
        if self.epoch is not None:
            parts["epoch"] = f"epoch {self.epoch:.1f}"
        if self.rate:
            parts["rate"] = rate_text(self.rate, self.unit)
        if self.took is not None:
            parts["left"] = f"in {duration_text(self.took)}"
        elif self.rate:
            parts["left"] = duration_text((self.total - self.done) / self.rate) + " left"
        numbers = {name: f"{name} {number_text(value)}" for name, value in self.numbers.items()}
        return parts | {f"number {name}": text for name, text in {**numbers, **self.chosen}.items()}

    def fitted(self, room: int) -> str:
        """Return as much of that on one line as ``room`` columns hold."""
        return fitting(self.parts(), room, LEAST_BESIDE_CHOSEN if self.chosen else LEAST_IMPORTANT)


class Pace:
    """The speed over a sliding window of time."""

    def __init__(self, window: float = SECONDS_OF_PACE) -> None:
        self._window = window
        self._samples: deque[tuple[float, float]] = deque()

    def add(self, now: float, done: float) -> None:
        """Note that ``done`` units were finished at ``now`` seconds."""
        self._samples.append((now, done))
        while len(self._samples) > 2 and self._samples[1][0] <= now - self._window:
            self._samples.popleft()

    @property
    def rate(self) -> float | None:
        """Units per second, or ``None`` while fewer than two moments are known."""
        if len(self._samples) < 2:
            return None
        (begin, before), (end, after) = self._samples[0], self._samples[-1]
        return (after - before) / (end - begin) if end > begin else None


class View(ABC):
    """Where a position is shown."""

    def __init__(self, console: Console, label: str, *, transient: bool, clock: Callable[[], float]) -> None:
        self.console = console
        self.label = label
        self.transient = transient
        self.clock = clock

    @abstractmethod
    def show(self, position: Position) -> None:
        """Show a position."""

    @abstractmethod
    def finish(self, position: Position | None) -> None:
        """Show the last position, if any, and clean up."""


class BarView(View):
    """A bar at the foot of a terminal; ``transient`` bars vanish in the end."""

    def __init__(self, console: Console, label: str, *, transient: bool, clock: Callable[[], float]) -> None:
        super().__init__(console, label, transient=transient, clock=clock)
        self._bar = BarColumn(bar_width=SHORTEST_BAR)
        self._display = RichProgress(
            TextColumn("[bold]{task.description}"),
            self._bar,
            TextColumn("{task.fields[tail]}", markup=False),
            console=console,
            auto_refresh=False,
            transient=transient,
            get_time=clock,
        )
        self._task = self._display.add_task(label, total=1.0, tail="")
        self._display.start()

    def show(self, position: Position) -> None:
        """Draw the bar anew."""
        room = self.console.width - len(self.label) - 2
        tail = position.fitted(room - SHORTEST_BAR)
        self._bar.bar_width = max(1, min(LONGEST_BAR, room - len(tail)))
        self._display.update(self._task, completed=position.share, tail=tail, refresh=True)

    def finish(self, position: Position | None) -> None:
        """Give the terminal back."""
        if position is not None:
            self.show(position)
        self._display.stop()


def fitting(parts: Mapping[str, str], room: int, first: Sequence[str] = LEAST_IMPORTANT) -> str:
    """Join what is to be said, leaving out the ``first`` things and then the last until it fits.

    The topic ``total`` is the end of the count.

    >>> fitting({"percent": "5%", "count": "epoch 1/20", "left": "0:19 left", "loss": "loss 1.5"}, 30)
    '5%  0:19 left  loss 1.5'
    >>> fitting({"percent": "5%", "count": "step 1/20", "over": "over 0.5"}, 20, ("percent", "total"))
    'step 1/20  over 0.5'
    """
    kept = dict(parts)
    for topic in (*first, *reversed(list(parts))):
        if len("  ".join(kept.values())) <= room or len(kept) == 1:
            break
        if topic == "total":
            kept["count"] = kept["count"].partition("/")[0]
        kept.pop(topic, None)
    return "  ".join(kept.values())


class LineView(View):
    """A plain line every tenth of the run and every half minute, for pipes and log files.

    The last position is left to whoever reports the result, unless the view is to stay (not ``transient``).
    """

    def __init__(self, console: Console, label: str, *, transient: bool, clock: Callable[[], float]) -> None:
        super().__init__(console, label, transient=transient, clock=clock)
        self._tenths: int | None = None
        self._time = clock()

    def show(self, position: Position) -> None:
        """Print a line if one is due."""
        now, tenths = self.clock(), int(position.share * 10)
        if self._tenths is None:
            self._tenths = tenths
        if tenths > self._tenths or now - self._time >= SECONDS_BETWEEN_LINES:
            self._tenths, self._time = tenths, now
            self._print(position)

    def finish(self, position: Position | None) -> None:
        """Print the last position if it stays."""
        if position is not None and not self.transient:
            self._print(position)

    def _print(self, position: Position) -> None:
        self.console.out(f"{self.label}: " + ", ".join(position.parts().values()), highlight=False)


class TrainingProgress:
    """Tells a view, at most twice a second, where a loop is; in between a call costs one look at the clock.

    A view that fails, because the pipe behind it is closed for example, is told nothing more; the loop goes on.

    Args:
        view: where it is shown.
        unit: ``"epoch"`` or ``"step"``.
        length: units in the whole run.
        steps_per_unit: optimizer steps in one unit.
        clock: the time in seconds.
        steps_per_epoch: optimizer steps of one pass over the data, if passes are to be shown beside the unit.
        chosen: returns what the experiment wants to be said, by label.
    """

    def __init__(
        self,
        view: View,
        *,
        unit: str,
        length: int,
        steps_per_unit: int,
        clock: Callable[[], float],
        steps_per_epoch: int | None = None,
        chosen: Callable[[], Mapping[str, str]] = dict,
    ) -> None:
        self._view = view
        self._steps_per_epoch = steps_per_epoch
        self._chosen = chosen
        self._unit = unit
        self._length = length
        self._steps_per_unit = steps_per_unit
        self._clock = clock
        self._begin = self._due = clock()
        self._pace = Pace()
        self._loop: LoopState | None = None

    def step(self, loop: LoopState) -> None:
        """Note that a step is done."""
        if self._clock() >= self._due:
            self._update(loop)

    def evaluated(self, loop: LoopState) -> None:
        """Note that an evaluation is done."""
        if self._clock() >= self._due:
            self._update(loop)

    def stop(self) -> None:
        """Show where the loop stands and finish the view."""
        loop, self._loop = self._loop, None
        now = self._clock()
        last = None if loop is None else replace(self._position(loop, now), took=now - self._begin)
        self._tell(lambda: self._view.finish(last))

    def _update(self, loop: LoopState) -> None:
        now = self._clock()
        self._loop = loop
        self._due = math.inf
        self._tell(lambda: self._view.show(self._position(loop, now)))

    def _tell(self, action: Callable[[], None]) -> None:
        try:
            action()
            self._due = self._clock() + SECONDS_BETWEEN_UPDATES
        except Exception as error:
            self._due = math.inf
            warnings.warn(
                f"The progress display failed and is switched off: {type(error).__name__}: {error}", stacklevel=2
            )

    def _position(self, loop: LoopState, now: float) -> Position:
        done = loop.step / self._steps_per_unit
        self._pace.add(now, done)
        chosen = self._chosen()
        return Position(
            self._unit,
            done,
            self._length,
            self._pace.rate,
            loop_loss(loop) if chosen else newest_numbers(loop),
            epoch=loop.step / self._steps_per_epoch if self._steps_per_epoch else None,
            chosen=chosen,
        )


def loop_loss(loop: LoopState) -> dict[str, float]:
    """Return the newest mean loss, if there is one."""
    return {} if loop.epoch_loss is None else {"loss": loop.epoch_loss}


def newest_numbers(loop: LoopState) -> dict[str, float]:
    """Return the newest loss and the validation accuracy, or else the first number of the evaluation."""
    numbers = loop_loss(loop)
    if "val_acc" in loop.evaluation:
        return {**numbers, "val_acc": loop.evaluation["val_acc"]}
    return numbers | dict(list(loop.evaluation.items())[:1])
