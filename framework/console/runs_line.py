"""Status line of parallel runs, and the progress messages of their processes."""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field

from rich.console import Console
from rich.live import Live
from rich.text import Text

from ..hooks import RunInfo, TrainingHook
from ..loops import Progress
from ..runs import Display
from ..training import TrainingTask
from .progress import SECONDS_BETWEEN_LINES, SECONDS_BETWEEN_UPDATES, Position, TrainingProgress
from .text import printable

MARK = "\x1e"  # marks progress messages among the printed lines of a process


class ProgressMessages(Display):
    """Sends the position of a run to the parent process on standard output."""

    def strategy_started(self, run: RunInfo, task: TrainingTask, hooks: Sequence[TrainingHook]) -> Progress:
        """Return the progress that sends the messages."""
        steps = len(task.loader) if run.loop == "epoch" else None
        return TrainingProgress(self, unit=run.loop, length=task.length, steps_per_epoch=steps, clock=time.monotonic)

    def show(self, position: Position) -> None:
        """Send a position."""
        os.write(1, f"{MARK}{position.parts()['count']}\n".encode())

    def finish(self, position: Position | None) -> None:
        """Do nothing: the parent process notices the end of the process."""


@dataclass
class RunsLine:
    """Shows the number of finished runs and the positions of the others, at the bottom of a terminal or as lines."""

    console: Console
    total: int
    _: KW_ONLY
    clock: Callable[[], float] = time.monotonic
    done: int = 0
    running: dict[str, str] = field(default_factory=dict)  # positions of the running runs, by name

    def __post_init__(self) -> None:
        """Prepare the bottom line of a terminal."""
        self._live = Live(console=self.console, auto_refresh=False, transient=True)
        self._is_bar = self.console.is_interactive
        self._due = self.clock() + (0.0 if self._is_bar else SECONDS_BETWEEN_LINES)

    def show(self) -> None:
        """Show the line if it is due."""
        if self.clock() < self._due:
            return
        where = ", ".join(f"{name} {printable(text)}" for name, text in self.running.items())
        line = f"{self.done} of {self.total} runs done, {len(self.running)} running: {where}"
        if self._is_bar:
            self._live.start()
            self._live.update(Text(line, no_wrap=True, overflow="ellipsis"), refresh=True)
        else:
            self.console.out(line, highlight=False)
        self._due = self.clock() + (SECONDS_BETWEEN_UPDATES if self._is_bar else SECONDS_BETWEEN_LINES)

    def close(self) -> None:
        """Release the terminal."""
        self._live.stop()
