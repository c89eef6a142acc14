"""The alternate screen of a terminal: taken, painted line by line, and given back however the process goes on."""

import os
import select
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import IO

from rich.console import Console
from rich.text import Text

from .lines import Line, cropped
from .signals import terminal_given_back_on_signals

TAKE = "\x1b[?1049h\x1b[?25l\x1b[?7l\x1b[2J"
GIVE_BACK = "\x1b[0m\x1b[?7h\x1b[?25h\x1b[?1049l"
WHOLE_PAINT_EVERY = 10


class Screen:
    """The whole terminal, while it is on.

    Only lines that differ from those painted before are written; every tenth painting writes all of them, in case
    something else wrote to the terminal. Where the terminal takes nothing (Ctrl-S, a reader that has stopped) or the
    process is in the background, a painting is left out rather than waited for.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._stream: IO[str] = console.file
        self._on = ExitStack()
        self._taken = False
        self._painted: list[Line] = []
        self._size = (0, 0)
        self._paintings = 0
        self._styles: dict[str, tuple[str, str]] = {}

    def open(self) -> None:
        """Have signals give the terminal back; it is taken by the first painting."""
        self._stream = self._console.file
        self._on.enter_context(terminal_given_back_on_signals(self._give_back_at_once))

    def close(self) -> None:
        """Give the terminal back: its first screen, its cursor, its wrapping of lines; twice does nothing."""
        self._on.close()
        if self._taken:
            self._taken = False
            with suppress(OSError):  # the terminal is gone
                self._write(GIVE_BACK)

    @property
    def size(self) -> tuple[int, int]:
        """Columns and lines of the terminal now."""
        try:
            columns, lines = os.get_terminal_size(self._stream.fileno())
        except (OSError, ValueError):  # not a terminal of the system: what the console was told
            columns = lines = 0
        return (columns, lines) if columns and lines else (self._console.width, self._console.height)

    def paint(self, draw: Callable[[int, int], Sequence[Line]]) -> bool:
        """Paint what ``draw(width, height)`` returns, one text for each line; tell whether it could be painted."""
        if not self._is_ready():
            return False
        width, height = self.size
        lines = [cropped(line, width) for line in draw(width, height)][:height]
        whole = not self._taken or (width, height) != self._size or self._paintings % WHOLE_PAINT_EVERY == 0
        start = "" if self._taken else TAKE
        if self._taken and (width, height) != self._size:
            start = "\x1b[2J"
        before = [] if whole else self._painted
        changed = [
            self._codes(row, line) for row, line in enumerate(lines) if row >= len(before) or line != before[row]
        ]
        self._taken = True
        self._size, self._painted = (width, height), lines
        self._paintings += 1
        self._write(start + "".join(changed))
        return True

    def _codes(self, row: int, line: Line) -> str:
        """Return what writes a line where it belongs."""
        pieces = []
        for text, style in line:
            before, after = self._styles.get(style) or self._style_codes(style)
            pieces.append(f"{before}{text}{after}")
        return f"\x1b[{row + 1};1H\x1b[2K{''.join(pieces)}"

    def _style_codes(self, style: str) -> tuple[str, str]:
        """Ask the console once what it writes before and after text of a style: colours or, by NO_COLOR, none."""
        with self._console.capture() as captured:
            self._console.print(Text("|", style), end="")
        before, _, after = captured.get().partition("|")
        self._styles[style] = before, after
        return before, after

    def _write(self, text: str) -> None:
        if text:
            self._stream.write(text)
            self._stream.flush()

    def _is_ready(self) -> bool:
        """Tell whether the terminal is ours to write to and would take something."""
        try:
            descriptor = self._stream.fileno()
        except (OSError, ValueError):  # not a file of the system
            return True
        return _in_foreground(descriptor) and _takes_something(descriptor)

    def _give_back_at_once(self) -> None:
        """Give the terminal back from a signal handler, past Python's buffer; never waiting for the terminal."""
        if self._taken and self._is_ready():
            os.write(self._stream.fileno(), GIVE_BACK.encode())
        self._taken = False


def _in_foreground(descriptor: int) -> bool:
    try:
        return os.tcgetpgrp(descriptor) == os.getpgrp()
    except (OSError, AttributeError):  # not the controlling terminal, or a system without such
        return True


def _takes_something(descriptor: int) -> bool:
    try:
        return bool(select.select([], [descriptor], [], 0)[1])
    except (OSError, ValueError):  # a system that can only wait for sockets, or a number beyond its tables
        return True
