"""The full-screen display of a session: what it shows, when it is drawn, and what is told after it."""

import math
import os
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from typing import IO, Any

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from ..hooks import HookPoint, MetricSink, RunInfo
from .board import Board, Groups
from .frame import LONGEST_SPARKS, frame
from .progress import SECONDS_BETWEEN_UPDATES, Position
from .terminal import can_be_written, output_kept, terminal_given_back_on_signals

LARGEST_SHARE = 0.01
MOST_KEPT = 1_000_000
# Lines do not wrap on the screen: a terminal that draws a glyph wider than rich believes would scroll it away.
NO_WRAP, WRAP = "\x1b[?7l", "\x1b[?7h"
TAKE = f"\x1b[?1049h\x1b[?25l{NO_WRAP}"
GIVE_BACK = f"\x18\x1b[0m{WRAP}\x1b[?25h\x1b[?1049l"
"""Begins with the character that breaks off a command, since a signal may come in the middle of one."""
PATIENCE = 0.5
"""Seconds that a signal waits for a terminal that is behind with reading: one stopped by Ctrl-S is left as it is."""


class LiveDisplay(MetricSink):
    """The screen of all strategies of a session, and the sink of its metrics; drawn by the loop, never by a thread.

    A drawing is due half a second after the one before, and later where drawing is slow: it takes at most 1 % of the
    time. Where the terminal takes nothing (Ctrl-S) or the process is in the background, a drawing is left out rather
    than waited for. What is printed or put into the ``transcript`` meanwhile is told by :meth:`leave`, in its order.
    """

    name = "live"
    keeps = False

    def __init__(self, console: Console, live_metrics: Groups, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.console, self.clock = console, clock
        self.board = Board(live_metrics, kept=LONGEST_SPARKS)
        self.is_on = False  # what is to be said waits in the transcript
        self.transcript: list[RenderableType | tuple[IO[str], str]] = []  # texts that were printed with their streams
        self._position: Position | None = None
        draw = lambda: frame(self.board, self._position, self.console)
        own: dict[str, Any] = {"auto_refresh": False, "redirect_stdout": False, "redirect_stderr": False}
        self._screen = Live(console=console, screen=True, get_renderable=draw, **own)
        self._is_taken = False
        self._on = ExitStack()
        self._due = clock()
        self._kept = self._dropped = 0

    def set_run_context(self, run: RunInfo) -> None:
        """Begin a strategy."""
        self.board.begin(run)

    def emit(self, metrics: Mapping[str, Any], epoch: int, hook_point: HookPoint, *, step: int) -> None:
        """Store the metrics, and draw them if a drawing is due."""
        self.board.take(metrics, epoch, step)
        self.draw_if_due()

    def open(self) -> None:
        """Keep what is printed and have signals give the terminal back; it is taken by the first drawing."""
        if not self.is_on:
            self.is_on = True
            self._on.enter_context(terminal_given_back_on_signals(self._give_back_at_once))
            self._on.enter_context(output_kept(self._keep))
            self._on.callback(self._give_back)
        self._due = self.clock()
        self._position = None
        self.draw_if_due()

    def show(self, position: Position) -> None:
        """Note how far the strategy has come, and draw it if a drawing is due."""
        self._position = position
        self.draw_if_due()

    def finish(self, position: Position | None) -> None:
        """Draw how far the strategy came."""
        if position is not None:
            self._due = self.clock()
            self.show(position)

    def draw_if_due(self) -> None:
        """Draw, unless the last drawing was a moment ago."""
        begin = self.clock()
        if not self.is_on or begin < self._due:
            return
        self._due = math.inf  # where drawing fails it stays so, and nothing is due again
        try:
            self._draw()
            end = self.clock()
            self._due = end + max(SECONDS_BETWEEN_UPDATES, (end - begin) / LARGEST_SHARE)
        except Exception as error:
            warnings.warn(f"The live display failed and is switched off: {type(error).__name__}: {error}", stacklevel=2)

    def leave(self, tell: Callable[[RenderableType], None]) -> None:
        """Give the terminal back and tell what was kept."""
        self.is_on = False
        self._on.close()
        if self._dropped:
            tell(Text(f"{self._dropped:,} characters that were printed before are left out here.", style="dim"))
        transcript, self.transcript, self._kept, self._dropped = self.transcript, [], 0, 0
        for item in transcript:
            if isinstance(item, tuple):
                stream, text = item
                with suppress(OSError):  # the terminal is gone
                    stream.write(text)
                    stream.flush()
            else:
                tell(item)

    def _draw(self) -> None:
        """Take the terminal, if that is not done or a signal gave it back, and draw."""
        if not can_be_written(self.console.file):
            return
        with suppress(OSError):  # rich would keep to COLUMNS and LINES where these are exported
            if all(size := os.get_terminal_size(self.console.file.fileno())):
                self.console.size = size
        # What is written here reaches the terminal with the next drawing of rich, which flushes the file.
        if not self._screen.is_started:
            self._screen.start()
            self.console.file.write(NO_WRAP)
        elif not self._is_taken:
            self.console.file.write(TAKE)
        self._is_taken = True
        self._screen.refresh()

    def _give_back(self) -> None:
        """Give the terminal back: its first screen, its cursor, its wrapping of lines."""
        if self._screen.is_started:
            with suppress(OSError):  # the terminal is gone
                # After Ctrl-Z the cursor is elsewhere: taken once more, the terminal knows where to put it back.
                self.console.file.write(WRAP if self._is_taken else TAKE + WRAP)
                self._is_taken = False
                self._screen.stop()

    def _give_back_at_once(self) -> None:
        """Give the terminal back from a signal handler, past Python's buffer; never waiting for it long."""
        if self._is_taken and can_be_written(self.console.file, PATIENCE):
            os.write(self.console.file.fileno(), GIVE_BACK.encode())
        self._is_taken = False

    def _keep(self, stream: IO[str], text: str) -> None:
        self.board.printed_lines += text.count("\n")
        self.transcript.append((stream, text))
        self._kept += len(text)
        while self._kept > MOST_KEPT:
            oldest = next(item for item in self.transcript if isinstance(item, tuple))
            self.transcript.remove(oldest)
            self._kept -= len(oldest[1])
            self._dropped += len(oldest[1])
