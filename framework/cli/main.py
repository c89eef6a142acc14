"""Entry point of the command ``loopscope``: handles ``--help`` and ``--version`` without slow imports."""

import errno
import io
import os
import signal
import sys
from collections.abc import Callable, Sequence
from platform import python_version
from types import TracebackType
from typing import Any, TextIO

from ..interruption import end_process, is_partly_imported
from ..preserved_streams import preserved_streams

STDOUT, STDERR = 1, 2
COMMAND_MODULES = ("jsonargparse", "docstring_parser", "yaml", "shtab")
"""Modules of the extra ``cli``, which only the command needs."""
Excepthook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]

USAGE = """usage: loopscope COMMAND ...

  loopscope run EXPERIMENT   train an experiment with hooks; --help shows its options
  loopscope watch COMMAND    run a training script unchanged, with loopscope attached; --help shows its options
  loopscope check COMMAND    try laws that every training obeys on the first batches of a script, or of an experiment
  loopscope equal A B        tell whether an edit of a training is better, worse or equal, by pairs of runs
  loopscope ls [FOLDER]      list the runs in a folder: state, length, final metrics
  loopscope show RUN         show the options, the result and the metrics of a run
  loopscope doctor RUN       diagnose a run: what is wrong, why, and what to do next
  loopscope alerts RUN       list the alerts and findings of a run, also since a step
  loopscope plot RUN...      plot metrics of runs against steps
  loopscope compare RUN...   compare final and best metrics, settings, and seeds
  loopscope report RUN...    write an HTML page with curves and tables of runs
  loopscope new KIND NAME    write a working hook or experiment and its test as a starting point
  loopscope hooks            list all hooks
  loopscope hooks NAME       show every metric and option of a hook
  loopscope list             list the experiments, their strategies and presets
  loopscope resume RUN       resume an interrupted run
  loopscope rewind RUN       repeat some steps of a run bit for bit, with other hooks
  loopscope verify RUN       train a run again and compare it with its checkpoints
  loopscope diff RUN RUN     report the step and the tensor at which two runs diverge
  loopscope replay RUN       send the metrics of a finished run to W&B or TensorBoard
  loopscope agents           print a text about loopscope for a repository's AGENTS.md
  loopscope completion SHELL print a script that completes commands in a shell
  loopscope --version        print the versions of loopscope, Python, torch and NumPy

Options of a command: loopscope COMMAND --help
"""


def main(arguments: Sequence[str] | None = None, *, packages: str | Sequence[str] = ()) -> int:
    """Run the command and return its exit status: 0, 1 for a failed run, 2 for bad input, 128 + n after signal n.

    Args:
        arguments: the words after ``loopscope``; by default those of ``sys.argv``.
        packages: a package, or several, by name; they are imported before the command runs and fill the registries.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] in ("help", "-h", "--help"):
        print(USAGE, end="")  # noqa: T201
        return 0
    if words[0] == "--version":
        from ..optional_packages import installed_version

        torch, numpy = installed_version("torch"), installed_version("numpy")
        print(f"loopscope {installed_version('loopscope')}, python {python_version()}, torch {torch}, numpy {numpy}")  # noqa: T201
        return 0
    if words[0] in ("watch", "check", "equal"):
        # Nothing slow is imported: the first replaces this process, the others start some.
        from .check import check
        from .equal import equal
        from .watch import watch

        try:
            return {"watch": watch, "check": check, "equal": equal}[words[0]](words[1:])
        except SystemExit as end:  # a parser's --help
            return int(end.code or 0)
    with preserved_streams():
        # Imported here because it imports torch, which takes about two seconds.
        try:
            from .command import run_command
        except ModuleNotFoundError as error:
            if error.name not in COMMAND_MODULES:
                raise
            from ..optional_packages import extra_command

            command = extra_command("cli")
            sys.stderr.write(f"loopscope: The command needs {error.name}, which is not installed: {command}.\n")
            return 2
        return run_command(words, packages)


class _LastingFile(io.FileIO):
    """A file that discards output after its reader has closed or its disk is full."""

    lost: OSError | None = None

    def write(self, data: Any) -> int:
        """Write the data, or report success after an error has occurred."""
        try:
            return super().write(data) if self.lost is None else len(data)
        except OSError as error:
            self.lost = error
            return len(data)


def outlast_readers(number: int, stream: TextIO | None) -> TextIO:
    """Return a stream on standard output or error that never raises, so that a broken pipe never ends a run.

    A closed descriptor is redirected to the null device; otherwise the next file that is opened would get its number.
    """
    if stream is not None and not _is_descriptor(stream, number):
        return stream
    if stream is None:
        null_device = os.open(os.devnull, os.O_WRONLY)
        if null_device != number:
            os.dup2(null_device, number)
            os.close(null_device)
    file = io.BufferedWriter(_LastingFile(number, "w", closefd=False))
    encoding = "utf-8" if stream is None else stream.encoding
    return io.TextIOWrapper(file, encoding, "backslashreplace", line_buffering=number == STDERR or file.isatty())


def _is_descriptor(stream: TextIO, number: int) -> bool:
    """Flush a stream, and return whether it writes to this descriptor rather than to a replacement, as in tests."""
    try:
        stream.flush()
        return stream.fileno() == number
    except OSError:  # closed, or replaced by a stream without a file
        return False


def lost_output(stream: TextIO) -> str:
    """Flush a stream of :func:`outlast_readers`, and return why its output was lost; empty for a broken pipe."""
    stream.flush()
    lost = getattr(getattr(getattr(stream, "buffer", None), "raw", None), "lost", None)
    return "" if lost is None or lost.errno == errno.EPIPE else str(lost.strerror)


def without_traceback(default_hook: Excepthook) -> Excepthook:
    """Return an ``excepthook`` that reports bad input, such as two hooks of one name in a script, in one line."""

    def excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if issubclass(kind, KeyboardInterrupt):
            if is_partly_imported("torch"):  # the shutdown of the interpreter could crash
                end_process(signal.SIGINT)
            sys.stderr.write("loopscope: interrupted.\n")
            raise SystemExit(128 + signal.SIGINT)
        from ..errors import UsageError, user_code_lines

        if isinstance(error, UsageError):
            from .command import refused

            if "--traceback" in sys.argv:
                default_hook(kind, error, trace)
            lines = user_code_lines(error)
            if lines.rpartition("; ")[2].partition(":")[0] not in str(error):
                error.args = (f"{error} [{lines}]",)
            raise SystemExit(refused(error))
        default_hook(kind, error, trace)

    return excepthook
