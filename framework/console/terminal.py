"""What rich leaves open at a terminal: a closed pipe, signals, Ctrl-S, and what other code prints or warns of."""

import io
import os
import select
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from types import FrameType
from typing import IO, Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from ..errors import RunNotice
from ..hooks import Alert
from .board import Label
from .text import printable

SIGNALS = [number for number in signal.Signals if number.name in ("SIGTSTP", "SIGTERM", "SIGQUIT", "SIGHUP")]
Keep = Callable[[IO[str], str], None]


class LastingConsole(Console):
    """A console that outlives its reader: where rich exits as a pipe is closed, this one is quiet from then on.

    What it is given to show, which may come from a plug-in or a file, gives the terminal no commands.
    """

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        """Yield the pieces of what is shown, with everything that a terminal would take as a command replaced."""
        for piece in super().render(renderable, options):
            text = piece.text
            if piece.control or text == "\n" or text.isprintable():
                yield piece
            else:
                yield Segment("\n".join(map(printable, text.split("\n"))), piece.style)

    def on_broken_pipe(self) -> None:
        """Write to nowhere, so that nothing fails again, not even the last flush of the process."""
        self.quiet = True
        if self.file is sys.stdout:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, sys.stdout.fileno())
            os.close(nowhere)


def make_console() -> Console:
    """Return a console on standard output that writes control codes to terminals only, whatever the environment."""
    forced = None if sys.stdout.isatty() else False
    return LastingConsole(force_terminal=forced, highlight=False, markup=False, emoji=False)


def can_be_taken(console: Console) -> bool:
    """Return whether a console is a terminal that can be drawn on: no pipe, no dumb one, none of an old Windows."""
    return console.is_terminal and console.is_interactive and not (console.is_dumb_terminal or console.legacy_windows)


def can_be_written(file: IO[str], patience: float = 0) -> bool:
    """Return whether a terminal takes something from this process: in the foreground, no Ctrl-S, a reader at work.

    A reader that is behind has ``patience`` seconds to catch up.
    """
    try:
        descriptor = file.fileno()
        if os.tcgetpgrp(descriptor) != os.getpgrp():
            return False
    except (OSError, ValueError, AttributeError):  # not the controlling terminal, or a system without such
        pass
    try:
        return bool(select.select([], [file], [], patience)[1])
    except (OSError, ValueError):  # a system that can only wait for sockets, or a number beyond its tables
        return True


@contextmanager
def terminal_given_back_on_signals(give_back: Callable[[], None]) -> Iterator[None]:
    """Call ``give_back`` before signals that stop or end the process; then they do what they would have done.

    Signals for which somebody has a handler are left alone, and so are all of them outside the main thread.
    """
    owner = os.getpid()

    def handle(number: int, frame: FrameType | None) -> None:
        if os.getpid() == owner:  # in a forked process the terminal is the parent's
            give_back()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        signal.signal(number, handle)  # the process was stopped, and goes on

    main = threading.current_thread() is threading.main_thread()
    ours = [number for number in SIGNALS if main and signal.getsignal(number) is signal.SIG_DFL]
    for number in ours:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number in ours:
            if signal.getsignal(number) is handle:
                signal.signal(number, signal.SIG_DFL)


@contextmanager
def show_warnings(
    show: Callable[[Label, str], None], *, alerts: bool = True, kind: type[Warning] = Warning
) -> Iterator[None]:
    """Hand every warning of a ``kind`` to ``show`` as its label and its sentence, not to be printed as it was.

    Without ``alerts`` those are left out: a sink takes them.
    """
    before = warnings.showwarning

    def shown(message: Warning | str, category: type[Warning], *where: Any, **rest: Any) -> None:
        if isinstance(message, Alert) and not alerts:
            return
        if not issubclass(category, kind):
            before(message, category, *where, **rest)
            return
        # A notice is information, every other warning is trouble.
        show("note" if issubclass(category, RunNotice) else "warning", " ".join(str(message).split()))

    warnings.showwarning = shown
    try:
        yield
    finally:
        warnings.showwarning = before


class _KeptBytes(io.RawIOBase):
    """Hands what is written to ``keep``, as text, as long as it is held; afterwards to the stream it stands for."""

    def __init__(self, stream: IO[str], keep: Keep) -> None:
        self._stream, self._keep, self._owner = stream, keep, os.getpid()
        self.is_held = True

    def writable(self) -> bool:
        """Return true."""
        return True

    def write(self, data: "bytes | bytearray | memoryview") -> int:  # type: ignore[override]
        """Keep some text; in a forked process, whose memory nobody will read, write it."""
        text = bytes(data).decode("utf-8", "replace")
        if self.is_held and os.getpid() == self._owner:
            self._keep(self._stream, text)
        else:
            self._stream.write(text)
        return len(data)

    def fileno(self) -> int:
        """Return the number of the stream's file, for child processes."""
        return self._stream.fileno()


@contextmanager
def output_kept(keep: Keep) -> Iterator[None]:
    """Hand what Python prints on the terminal, and not what goes to a file, to ``keep(stream, text)``."""
    with ExitStack() as stack:
        for stream, redirect in ((sys.stdout, redirect_stdout), (sys.stderr, redirect_stderr)):
            if stream.isatty():
                kept = _KeptBytes(stream, keep)
                text = io.TextIOWrapper(kept, "utf-8", newline="\n", write_through=True)  # type: ignore[type-var]
                text.rich_proxied_file = stream  # type: ignore[attr-defined]  # where rich itself goes on writing
                stack.enter_context(redirect(text))
                stack.callback(setattr, kept, "is_held", False)  # who still has the text writes to the terminal
        yield
