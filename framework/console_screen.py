"""The alternate screen of a terminal: taken, painted line by line, and given back however the process goes on."""

import os
import select
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import IO

from rich.console import Console
from rich.text import Text

from framework.console_layout import cropped
from framework.console_signals import terminal_given_back_on_signals

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
        self._painted: list[Text] = []
        self._size = (0, 0)
        self._paintings = 0

    def open(self) -> None:
        """Have signals give the terminal back; it is taken by the first painting."""
        self._stream = self._console.file
        self._on.enter_context(terminal_given_back_on_signals(self._give_back_at_once))

    def close(self) -> None:
        """Give the terminal back: its first screen, its cursor, its wrapping of lines; twice does nothing."""
        self._on.close()
        if self._taken:
            self._taken = False
            self._write(GIVE_BACK)

    @property
    def size(self) -> tuple[int, int]:
        """Columns and lines of the terminal now."""
        try:
            columns, lines = os.get_terminal_size(self._stream.fileno())
        except (OSError, ValueError):  # not a terminal of the system: what the console was told
            columns = lines = 0
        return (columns, lines) if columns and lines else (self._console.width, self._console.height)

    def paint(self, draw: Callable[[int, int], Sequence[Text]]) -> bool:
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
        changed = [(row, line) for row, line in enumerate(lines) if row >= len(before) or not _equal(line, before[row])]
        self._taken = True
        self._size, self._painted = (width, height), lines
        self._paintings += 1
        self._write(start + self._codes(changed))
        return True

    def _codes(self, changed: Sequence[tuple[int, Text]]) -> str:
        """Return what writes lines where they belong."""
        if not changed:
            return ""
        with self._console.capture() as captured:
            self._console.print(Text("\n").join(line for _, line in changed), soft_wrap=True, end="")
        codes = captured.get().split("\n")
        return "".join(f"\x1b[{row + 1};1H\x1b[2K{code}" for (row, _), code in zip(changed, codes, strict=True))

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


def _equal(line: Text, before: Text) -> bool:
    return line.plain == before.plain and line.spans == before.spans and line.style == before.style


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
