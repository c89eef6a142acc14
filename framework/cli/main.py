"""The door of the command ``loopscope``: answers ``--help`` and ``--version`` before anything slow is imported."""

import errno
import io
import os
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from platform import python_version
from types import TracebackType
from typing import Any, TextIO

from ..preserved_streams import preserved_streams

STDOUT, STDERR = 1, 2
Excepthook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]

USAGE = """usage: loopscope COMMAND ...

  loopscope run EXPERIMENT   train an experiment, with hooks; --help shows its options
  loopscope ls [FOLDER]      the runs in a folder: state, length, final numbers
  loopscope show RUN         what was run, how it ended, and its metrics
  loopscope plot RUN...      draw metrics of runs against steps
  loopscope compare RUN...   final and best numbers, what differs, and what several seeds tell
  loopscope report RUN...    write a page with curves and tables of runs, for a browser
  loopscope new KIND NAME    write a hook or an experiment that runs, and its test, for you to change
  loopscope hooks            all hooks, one line each
  loopscope hooks NAME       every metric and option of a hook
  loopscope list             the experiments, their strategies and presets
  loopscope resume RUN       go on with a run that was interrupted
  loopscope rewind RUN       train a stretch of a run again, with other hooks, bit for bit
  loopscope diff RUN RUN     say at which step and in which tensor two runs part
  loopscope replay RUN       send the metrics of a finished run to W&B or TensorBoard
  loopscope --version        the versions of loopscope, Python, torch and NumPy

The options of a command: loopscope COMMAND --help
"""


def main(arguments: Sequence[str] | None = None, *, packages: Sequence[str] = ()) -> int:
    """Run the command and return its exit status: 0, 1 for a failed run, 2 for bad input, 128 + n after signal n.

    Args:
        arguments: the words after ``loopscope``; by default those that the program was started with.
        packages: imported before a command runs; they fill the registries.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] in ("help", "-h", "--help"):
        print(USAGE, end="")  # noqa: T201
        return 0
    if words[0] == "--version":
        torch, numpy = _installed("torch"), _installed("numpy")
        print(f"loopscope {_installed('loopscope')}, python {python_version()}, torch {torch}, numpy {numpy}")  # noqa: T201
        return 0
    with preserved_streams():
        # Only now: this imports torch, which takes about two seconds.
        from .command import run_command

        return run_command(words, packages)


class _LastingFile(io.FileIO):
    """A file that swallows what is written to it once its reader has gone or its disk is full."""

    lost: OSError | None = None

    def write(self, data: Any) -> int:
        """Write, or else pretend to."""
        try:
            return super().write(data) if self.lost is None else len(data)
        except OSError as error:
            self.lost = error
            return len(data)


def outlast_readers(number: int, stream: TextIO | None) -> TextIO:
    """Return a stream on standard output or error that never raises, so that no run ends as its reader does.

    A descriptor that was closed leads nowhere from now on: otherwise the next file that is opened would get its number.
    """
    if stream is not None and not _is_descriptor(stream, number):
        return stream
    if stream is None:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        if nowhere != number:
            os.dup2(nowhere, number)
            os.close(nowhere)
    file = io.BufferedWriter(_LastingFile(number, "w", closefd=False))
    encoding = "utf-8" if stream is None else stream.encoding
    return io.TextIOWrapper(file, encoding, "backslashreplace", line_buffering=number == STDERR or file.isatty())


def _is_descriptor(stream: TextIO, number: int) -> bool:
    """Flush a stream, and return whether it writes to a descriptor itself, and not to what a test put in its place."""
    try:
        stream.flush()
        return stream.fileno() == number
    except OSError:  # it was closed, or replaced by one without a file
        return False


def lost_output(stream: TextIO) -> str:
    """Flush a stream of :func:`outlast_readers`, and say why what was written to it is lost, unless nobody read on."""
    stream.flush()
    lost = getattr(getattr(getattr(stream, "buffer", None), "raw", None), "lost", None)
    return "" if lost is None or lost.errno == errno.EPIPE else str(lost.strerror)


def without_traceback(before: Excepthook) -> Excepthook:
    """Return an ``excepthook`` that refuses bad input, such as two hooks of one name in a script, in one line."""

    def excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        from ..errors import UsageError, users_lines
        from .command import refused

        if isinstance(error, UsageError):
            if "--traceback" in sys.argv:
                before(kind, error, trace)
            lines = users_lines(error)
            if lines.rpartition("; ")[2].partition(":")[0] not in str(error):
                error.args = (f"{error} [{lines}]",)
            raise SystemExit(refused(error))
        before(kind, error, trace)

    return excepthook


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
