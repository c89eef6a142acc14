"""Terminal handling beyond rich: broken pipes, signals, Ctrl-S, and captured output and warnings."""

import io
import os
import select
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, redirect_stderr, redirect_stdout, suppress
from types import FrameType
from typing import IO, Any, cast

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from ..doctor import CRITICAL, FindingNotice
from ..errors import RunNotice, describe_error
from ..hooks import Alert, AlertNotice
from .board import Label
from .text import printable

SIGNALS = [number for number in signal.Signals if number.name in ("SIGTSTP", "SIGTERM", "SIGQUIT", "SIGHUP")]
Keep = Callable[[IO[str], str], None]


LEAST_WIDTH = 20
"""Columns for which output is laid out at least; a narrower terminal breaks its lines."""
UNKNOWN_WIDTH = 80


class LastingConsole(Console):
    """A console that becomes quiet if its output fails, where rich would exit or raise.

    It escapes control characters in its content, which may come from a plug-in or a file.
    """

    @property
    def file(self) -> IO[str]:
        """The output, which never raises."""
        stream: Any = LastingStream(super().file, self._become_quiet)
        return cast(IO[str], stream)

    @file.setter
    def file(self, new_file: IO[str]) -> None:
        self._file = new_file

    def _become_quiet(self, error: Exception) -> None:
        """Print nothing from now on, and report it on standard error, if that is possible."""
        if not self.quiet:
            self.quiet = True
            reason = describe_error(error)
            with suppress(Exception):
                sys.stderr.write(f"loopscope: nothing more is displayed, since output failed: {reason}\n")

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        """Yield the segments of the content, with control characters replaced."""
        for piece in super().render(renderable, options):
            text = piece.text
            if piece.control or text == "\n" or text.isprintable():
                yield piece
            else:
                yield Segment("\n".join(map(printable, text.split("\n"))), piece.style)

    def on_broken_pipe(self) -> None:
        """Redirect output to the null device, so that later writes and the final flush of the process succeed."""
        self.quiet = True
        if self._file in (None, sys.stdout):
            null_device = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null_device, sys.stdout.fileno())
            os.close(null_device)


class LastingStream:
    """A stream that leaves out what it cannot write, and writes above the bars of tqdm.

    Args:
        stream: the stream of a program, which may be closed, on a full disk, not in UTF-8, or a class of the program.
        on_error: receives the error of a write.
    """

    def __init__(self, stream: Any, on_error: Callable[[Exception], None]) -> None:
        self._stream, self._on_error = stream, on_error

    def write(self, text: str) -> int:
        """Write a text; characters that the encoding does not have become question marks."""
        try:
            with _above_bars(self._stream):
                try:
                    self._stream.write(text)
                except UnicodeEncodeError:
                    encoding = getattr(self._stream, "encoding", None) or "ascii"
                    self._stream.write(text.encode(encoding, "replace").decode(encoding))
        except BrokenPipeError:
            raise
        except Exception as error:
            self._on_error(error)
        return len(text)

    def flush(self) -> None:
        """Flush the stream."""
        try:
            self._stream.flush()
        except BrokenPipeError:
            raise
        except Exception as error:
            self._on_error(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def has_foreign_bars() -> bool:
    """Return whether a bar of tqdm is on the screen."""
    bars = getattr(getattr(sys.modules.get("tqdm"), "tqdm", None), "_instances", ())
    return any(not getattr(bar, "disable", True) for bar in [*bars])


@contextmanager
def _above_bars(stream: Any) -> Iterator[None]:
    """Remove the bars of tqdm from the screen for the body; tqdm is not imported here."""
    with sys.modules["tqdm"].tqdm.external_write_mode(file=stream) if has_foreign_bars() else nullcontext():
        yield


def is_terminal(stream: Any) -> bool:
    """Return whether a stream is a terminal: it may be closed, ``None``, or a class without ``isatty``."""
    try:
        return bool(stream.isatty())
    except (AttributeError, ValueError, OSError):
        return False


def make_console(stream: Any = None) -> Console:
    """Return a console that writes control codes to terminals only, ignoring the environment.

    ``stream`` is ``sys.stderr``, or by default standard output.
    """
    is_error = stream is not None and stream is sys.stderr
    forced = None if is_terminal(sys.stderr if is_error else sys.stdout) else False
    console = LastingConsole(force_terminal=forced, highlight=False, markup=False, emoji=False, stderr=is_error)
    if console.width < LEAST_WIDTH:
        console.width = LEAST_WIDTH if console.width > 0 else UNKNOWN_WIDTH  # some programs set COLUMNS to 0
    return console


def supports_full_screen(console: Console) -> bool:
    """Return whether a console is a terminal with full-screen support: no pipe, dumb or legacy Windows terminal."""
    return console.is_terminal and console.is_interactive and not (console.is_dumb_terminal or console.legacy_windows)


def accepts_output(file: IO[str], patience: float = 0) -> bool:
    """Return whether a terminal accepts output of this process: in the foreground and not stopped by Ctrl-S.

    A slow terminal has ``patience`` seconds.
    """
    try:
        descriptor = file.fileno()
        if os.tcgetpgrp(descriptor) != os.getpgrp():
            return False
    except (OSError, ValueError, AttributeError):  # not the controlling terminal, or a system without one
        pass
    try:
        return bool(select.select([], [file], [], patience)[1])
    except (OSError, ValueError):  # a system that can only wait for sockets, or a number beyond its tables
        return True


@contextmanager
def restore_terminal_on_signals(restore: Callable[[], None]) -> Iterator[None]:
    """Call ``restore`` before signals that stop or end the process take their default effect.

    Signals that already have a handler keep it. Outside the main thread the context manager does nothing.
    """
    process = os.getpid()

    def handle(number: int, frame: FrameType | None) -> None:
        if os.getpid() == process:  # in a forked process the terminal belongs to the parent
            restore()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        signal.signal(number, handle)  # the process was stopped and continues

    main = threading.current_thread() is threading.main_thread()
    numbers = [number for number in SIGNALS if main and signal.getsignal(number) is signal.SIG_DFL]
    for number in numbers:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number in numbers:
            if signal.getsignal(number) is handle:
                signal.signal(number, signal.SIG_DFL)


@contextmanager
def show_warnings(
    show: Callable[[Label, str], None], *, alerts: bool = True, kind: type[Warning] = Warning
) -> Iterator[None]:
    """Pass every warning of a ``kind`` to ``show`` with label and sentence instead of printing it.

    Without ``alerts``, alerts are dropped: a sink shows them.
    """
    previous = warnings.showwarning

    def shown(message: Warning | str, category: type[Warning], *where: Any, **rest: Any) -> None:
        if isinstance(message, (Alert, AlertNotice)) and not alerts:
            return
        if not issubclass(category, kind):
            previous(message, category, *where, **rest)
            return
        text = " ".join(str(message).split())
        if issubclass(category, FindingNotice) and text.startswith(CRITICAL):
            show("critical", text.removeprefix(CRITICAL))
            return
        # A notice is information, except for a finding of the diagnosis; any other warning is a problem.
        is_note = issubclass(category, RunNotice) and not issubclass(category, FindingNotice)
        show("note" if is_note else "warning", text)

    warnings.showwarning = shown
    try:
        yield
    finally:
        warnings.showwarning = previous


class _CapturedBytes(io.RawIOBase):
    """Passes written text to ``keep`` while ``is_capturing``, afterwards to the original stream."""

    def __init__(self, stream: IO[str], keep: Keep) -> None:
        self._stream, self._keep, self._process = stream, keep, os.getpid()
        self.is_capturing = True

    def writable(self) -> bool:
        """Return True."""
        return True

    def write(self, data: "bytes | bytearray | memoryview") -> int:  # type: ignore[override]
        """Keep some text, or write it in a forked process, whose kept text would be lost."""
        text = bytes(data).decode("utf-8", "replace")
        if self.is_capturing and os.getpid() == self._process:
            self._keep(self._stream, text)
        else:
            self._stream.write(text)
        return len(data)

    def fileno(self) -> int:
        """Return the stream's file descriptor, for child processes."""
        return self._stream.fileno()


@contextmanager
def captured_output(keep: Keep) -> Iterator[None]:
    """Pass what Python prints on the terminal to ``keep(stream, text)``; output to files is not affected."""
    with ExitStack() as stack:
        for stream, redirect in ((sys.stdout, redirect_stdout), (sys.stderr, redirect_stderr)):
            if is_terminal(stream):
                stream_bytes = _CapturedBytes(stream, keep)
                text = io.TextIOWrapper(stream_bytes, "utf-8", newline="\n", write_through=True)  # type: ignore[type-var]
                text.rich_proxied_file = stream  # type: ignore[attr-defined]  # rich keeps writing to the original stream
                stack.enter_context(redirect(text))
                # Afterwards writes through the wrapper go to the terminal.
                stack.callback(setattr, stream_bytes, "is_capturing", False)
        yield
