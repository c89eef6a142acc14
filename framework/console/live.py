"""Full-screen display of a session."""

import math
import os
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from typing import IO, Any

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from ..errors import warn
from ..hooks import HookPoint, MetricSink, RunInfo
from .board import Board, Groups
from .frame import LONGEST_SPARKS, frame
from .progress import SECONDS_BETWEEN_UPDATES, Position
from .terminal import accepts_output, captured_output, restore_terminal_on_signals

LARGEST_SHARE = 0.01
MOST_KEPT = 1_000_000
# Lines do not wrap on the screen: a terminal that draws a glyph wider than rich believes would scroll it away.
NO_WRAP, WRAP = "\x1b[?7l", "\x1b[?7h"
ENTER_SCREEN = f"\x1b[?1049h\x1b[?25l{NO_WRAP}"
RESTORE_SCREEN = f"\x18\x1b[0m{WRAP}\x1b[?25h\x1b[?1049l"
"""Starts with CAN, which aborts a partial control sequence, since a signal may interrupt one."""
PATIENCE = 0.5
"""Seconds that a signal handler waits for a slow terminal; one stopped by Ctrl-S is not restored."""


class LiveDisplay(MetricSink):
    """The screen of a session and the sink of its metrics; drawn by the training loop, without a thread.

    Drawings are at least half a second apart, and take at most 1 % of the time. A drawing is skipped if the terminal
    does not accept output (Ctrl-S) or the process is in the background. Output that is printed or added to the
    ``transcript`` meanwhile is printed by :meth:`leave`, in order.
    """

    name = "live"
    keeps = False

    def __init__(self, console: Console, live_metrics: Groups, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.console, self.clock = console, clock
        self.board = Board(live_metrics, kept=LONGEST_SPARKS)
        self.is_on = False  # while on, output goes to the transcript
        self.transcript: list[RenderableType | tuple[IO[str], str]] = []  # printed texts have their streams
        self._position: Position | None = None
        options: dict[str, Any] = {"auto_refresh": False, "redirect_stdout": False, "redirect_stderr": False}
        self._screen = Live(console=console, screen=True, get_renderable=self._frame, **options)
        self._is_full_screen = False
        self._on = ExitStack()
        self._due = clock()
        self._kept = self._dropped = 0

    def set_run_context(self, run: RunInfo) -> None:
        """Start a strategy."""
        self.board.start(run)

    def emit(self, metrics: Mapping[str, Any], epoch: int, hook_point: HookPoint, *, step: int) -> None:
        """Store the metrics, and draw them if a drawing is due."""
        self.board.take(metrics, epoch, step)
        self.draw_if_due()

    def open(self) -> None:
        """Capture printed output and let signals restore the terminal; the first drawing enters the full screen."""
        if not self.is_on:
            self.is_on = True
            self._on.enter_context(restore_terminal_on_signals(self._restore_terminal_in_handler))
            self._on.enter_context(captured_output(self._keep))
            self._on.callback(self._restore_terminal)
        self._due = self.clock()
        self._position = None
        self.draw_if_due()

    def show(self, position: Position) -> None:
        """Store the position, and draw it if a drawing is due."""
        self._position = position
        self.draw_if_due()

    def finish(self, position: Position | None) -> None:
        """Draw the last position."""
        if position is not None:
            self._due = self.clock()
            self.show(position)

    def draw_if_due(self) -> None:
        """Draw if enough time has passed since the last drawing."""
        begin = self.clock()
        if not self.is_on or begin < self._due:
            return
        self._due = math.inf  # stays so if drawing fails, which disables the display
        try:
            self._draw()
            end = self.clock()
            self._due = end + max(SECONDS_BETWEEN_UPDATES, (end - begin) / LARGEST_SHARE)
        except Exception as error:
            warn(f"The live display failed and is disabled: {type(error).__name__}: {error}", stacklevel=2)

    def leave(self, print_item: Callable[[RenderableType], None]) -> None:
        """Restore the terminal and print the transcript."""
        self.is_on = False
        self._on.close()
        if self._dropped:
            print_item(Text(f"{self._dropped:,} earlier characters of output are omitted.", style="dim"))
        transcript, self.transcript, self._kept, self._dropped = self.transcript, [], 0, 0
        for item in transcript:
            if isinstance(item, tuple):
                stream, text = item
                with suppress(OSError):  # the terminal is gone
                    stream.write(text)
                    stream.flush()
            else:
                print_item(item)

    def _frame(self) -> RenderableType:
        return frame(self.board, self._position, self.console)

    def _draw(self) -> None:
        """Enter the full screen if needed, and draw."""
        if not accepts_output(self.console.file):
            return
        with suppress(OSError):  # rich would prefer exported COLUMNS and LINES
            if all(size := os.get_terminal_size(self.console.file.fileno())):
                self.console.size = size
        # rich flushes the file with its next drawing.
        if not self._screen.is_started:
            self._screen.start()
            self.console.file.write(NO_WRAP)
        elif not self._is_full_screen:
            self.console.file.write(ENTER_SCREEN)
        self._is_full_screen = True
        self._screen.refresh()

    def _restore_terminal(self) -> None:
        """Restore the terminal: primary screen, cursor, line wrapping."""
        if self._screen.is_started:
            with suppress(OSError):  # the terminal is gone
                # After Ctrl-Z the cursor has moved; entering the screen again lets the terminal restore its position.
                self.console.file.write(WRAP if self._is_full_screen else ENTER_SCREEN + WRAP)
                self._is_full_screen = False
                self._screen.stop()

    def _restore_terminal_in_handler(self) -> None:
        """Restore the terminal from a signal handler, bypassing Python's buffer, without waiting for long."""
        if self._is_full_screen and accepts_output(self.console.file, PATIENCE):
            os.write(self.console.file.fileno(), RESTORE_SCREEN.encode())
        self._is_full_screen = False

    def _keep(self, stream: IO[str], text: str) -> None:
        self.board.printed_lines += text.count("\n")
        self.transcript.append((stream, text))
        self._kept += len(text)
        while self._kept > MOST_KEPT:
            oldest = next(item for item in self.transcript if isinstance(item, tuple))
            self.transcript.remove(oldest)
            self._kept -= len(oldest[1])
            self._dropped += len(oldest[1])
