"""One console over runs that go on side by side, and what each of their processes tells it."""

import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from ..hooks import ENDLESS, RunInfo, TrainingHook
from ..loops import Progress
from ..runs import Display
from ..training import TrainingTask
from .board import Notice
from .progress import SECONDS_BETWEEN_LINES, SECONDS_BETWEEN_UPDATES, Position, TrainingProgress
from .run_console import Mode
from .seeds import conclusion
from .tables import result_line
from .terminal import make_console
from .text import cleaned, printable

MARK = "\x1e"
"""Begins what a run's process tells of its progress among the lines that are printed in it."""


class ToldProgress(Display):
    """Tells the process at the other end of standard output where a run stands."""

    def strategy_started(self, run: RunInfo, task: TrainingTask, hooks: Sequence[TrainingHook]) -> Progress:
        """Return what tells it."""
        return TrainingProgress(
            self,
            unit=run.loop,
            length=0 if run.is_endless else task.length,
            steps_per_epoch=len(task.loader) if len(task.loader) < ENDLESS else None,
            clock=time.monotonic,
        )

    def show(self, position: Position) -> None:
        """Tell a position."""
        os.write(1, f"{MARK}{position.parts()['count']}\n".encode())

    def finish(self, position: Position | None) -> None:
        """Leave the end to be seen by the end of the process."""


class RunsConsole:
    """Shows a line for each run that has ended and one for all that go on; a context manager.

    Args:
        mode: as that of :class:`.RunConsole`; ``live`` is ``normal``, with a note.
        total: how many runs there are.
        compared_to: strategies from which the distance is shown in the comparison, by the number that is compared.
        console: where to show it; standard output by default.
        clock: the time in seconds.
    """

    def __init__(
        self,
        mode: Mode,
        total: int,
        *,
        compared_to: Mapping[str, str],
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.console = console or make_console()
        self._mode, self._no_screen = ("normal", True) if mode == "live" else (mode, False)
        self._total, self._done = total, 0
        self._compared_to = compared_to
        self._clock = clock
        self._running: dict[str, str] = {}
        self._told: set[Notice] = set()
        self._silenced: Counter[Notice] = Counter()
        self._live = Live(console=self.console, auto_refresh=False, transient=True)
        self._bar = self.console.is_interactive and mode != "none"
        self._due = clock() + (0.0 if self._bar else SECONDS_BETWEEN_LINES)

    def __enter__(self) -> "RunsConsole":
        """Begin to show the line of progress."""
        if self._bar:
            self._live.start()
        if self._no_screen:
            self.notify("", Notice("note", "--live shows one run at a time; several side by side have a line each."))
        return self

    def __exit__(self, *error: object) -> None:
        """Give the terminal back, and tell what was silenced."""
        self._live.stop()
        for notice, count in self._silenced.items():
            self._print(notice.text(f" ({count} times)" if count > 1 else ""))

    def progressed(self, name: str, text: str) -> None:
        """Show how far a run has come."""
        self._running[name] = text
        if self._clock() < self._due or self._mode == "none":
            return
        if self._bar:
            self._live.update(Text(self.line(), no_wrap=True, overflow="ellipsis"), refresh=True)
        else:
            self._print(Text(self.line()))
        self._due = self._clock() + (SECONDS_BETWEEN_UPDATES if self._bar else SECONDS_BETWEEN_LINES)

    def line(self) -> str:
        """Say how many runs are done, and where the others are."""
        where = ", ".join(f"{name} {printable(text)}" for name, text in self._running.items())
        running = f", {len(self._running)} running: {where}" if self._running else ""
        return f"{self._done} of {self._total} runs done{running}"

    def notify(self, name: str, notice: Notice) -> None:
        """Show what is to be known of a run; a note that another run has told already is not repeated."""
        again = notice in self._told and notice.label == "note"
        self._told.add(notice)
        if self._mode == "silent":
            self._silenced[notice] += 1
        elif self._mode != "none" and not again:
            self._print(Text(f"{name}: " if name else "").append_text(notice.text()))

    def printed(self, name: str, line: str) -> None:
        """Show what a run's own code has printed."""
        self._print(Text(f"{name}: {printable(line)}"))

    def ended(self, name: str, summary: Mapping[str, Any] | None, problem: str = "") -> None:
        """Say how a run ended: with its summary, or with a problem in a word, or say nothing yet."""
        self._running.pop(name, None)
        self._done += summary is not None
        if self._mode == "normal" and (summary or problem):
            told = (
                Text(f"{name}: {problem}") if summary is None else result_line({**cleaned(summary), "strategy": name})
            )
            self._print(told)

    def concluded(self, summaries: Sequence[Mapping[str, Any]]) -> None:
        """Compare the runs that are completed and say where they lie."""
        if self._mode == "normal" and summaries:
            for part in conclusion(summaries, self._compared_to, self.console.width):
                self._print(part)

    def _print(self, shown: RenderableType) -> None:
        with suppress(OSError):  # the pipe is closed or the terminal gone: there is nobody to tell
            self.console.print(shown, soft_wrap=isinstance(shown, Text))
