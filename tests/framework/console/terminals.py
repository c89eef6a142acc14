"""Terminals with an alternate screen, rendered from the output of a process."""

import copy
import fcntl
import gc
import os
import pty
import select
import signal
import struct
import sys
import termios
import time
from collections.abc import Callable
from typing import Any

import pyte

ALTERNATE = 1049
PATIENCE = 30.0


class Terminal(pyte.Screen):
    """A pyte screen with an alternate screen."""

    def __init__(self, columns: int, lines: int) -> None:
        self.is_alternate = False
        self.left: list[list[str]] = []
        """Content of the alternate screen at each exit."""
        self.entered = 0
        super().__init__(columns, lines)

    def set_mode(self, *modes: int, **options: Any) -> None:
        if ALTERNATE in modes and options.get("private") and not self.is_alternate:
            self.is_alternate, self.entered = True, self.entered + 1
            self._primary = copy.deepcopy(self.buffer), copy.copy(self.cursor)
        super().set_mode(*modes, **options)

    def reset_mode(self, *modes: int, **options: Any) -> None:
        super().reset_mode(*modes, **options)
        if ALTERNATE in modes and options.get("private") and self.is_alternate:
            self.is_alternate = False
            self.left.append(list(self.display))
            buffer, cursor = self._primary
            self.buffer.clear()
            self.buffer.update(buffer)
            self.cursor.x, self.cursor.y = cursor.x, cursor.y

    @property
    def lines_shown(self) -> list[str]:
        """The lines of the visible screen without trailing spaces and empty lines."""
        return "\n".join(line.rstrip() for line in self.display).rstrip().split("\n")

    @property
    def is_restored(self) -> bool:
        """Whether the primary screen and the cursor are visible and lines wrap."""
        return not self.is_alternate and not self.cursor.hidden and pyte.modes.DECAWM in self.mode


class Process:
    """A forked process with a separate terminal; ``body`` runs in it and prints to that terminal."""

    def __init__(self, body: Callable[[], Any], columns: int = 80, lines: int = 24) -> None:
        self.terminal = Terminal(columns, lines)
        self._stream = pyte.ByteStream(self.terminal)
        self.status: int | None = None
        self.bytes = b""
        self.id, self._master = pty.fork()
        if self.id == 0:
            _run(body)
        self.resize(columns, lines)
        os.write(self._master, b"\n")  # starts the body, now that the size is set

    def resize(self, columns: int, lines: int) -> None:
        """Resize the terminal."""
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        self.terminal.resize(lines, columns)

    def modes(self) -> list[Any]:
        """Return the modes that ``stty -a`` shows."""
        return termios.tcgetattr(self._master)

    def type(self, keys: bytes) -> None:
        """Press keys."""
        os.write(self._master, keys)

    def kill(self, number: int) -> None:
        """Send a signal."""
        os.kill(self.id, number)

    def read_until(self, done: Callable[[Terminal], bool]) -> Terminal:
        """Read the output until ``done(terminal)``; fails after a timeout or at the end of the process."""
        end = time.monotonic() + PATIENCE
        while not done(self.terminal):
            assert time.monotonic() < end, "\n".join(self.terminal.display)
            assert self._read(), "\n".join(self.terminal.display)
        return self.terminal

    def finish(self) -> Terminal:
        """Read to the end and store the exit status."""
        while self._read():
            pass
        _, status = os.waitpid(self.id, 0)
        self.status = os.waitstatus_to_exitcode(status)
        self.modes_left = self.modes()
        os.close(self._master)
        return self.terminal

    def _read(self) -> bool:
        if select.select([self._master], [], [], 0.2)[0]:
            try:
                data = os.read(self._master, 65536)
            except OSError:  # the other end is closed
                return False
            self.bytes += data
            self._stream.feed(data)
            return bool(data)
        return True


def _run(body: Callable[[], Any]) -> None:
    status = 99
    # A signal during a collection is handled in the next Python code, such as the callback of Hypothesis, which loses
    # its KeyboardInterrupt.
    gc.callbacks.clear()
    try:
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGTSTP):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        sys.stdin.close()
        os.read(0, 1)
        sys.stdout, sys.stderr = (open(number, "w", encoding="utf-8") for number in (1, 2))  # noqa: SIM115
        body()
        status = 0
    except KeyboardInterrupt:
        status = 130
    except SystemExit as error:
        status = int(error.code or 0)
    except BaseException as error:
        print(f"raised {type(error).__name__}: {error}")  # noqa: T201
        status = 1
    finally:
        try:
            sys.stdout.flush()
        finally:
            os._exit(status)


def show(body: Callable[[], Any], columns: int = 80, lines: int = 24) -> Terminal:
    """Run ``body`` on a terminal until it ends."""
    process = Process(body, columns, lines)
    terminal = process.finish()
    assert process.status == 0, "\n".join(terminal.display)
    return terminal
