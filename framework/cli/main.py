"""The door of the command ``loopscope``: answers ``--help`` and ``--version`` before anything slow is imported."""

import sys
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from platform import python_version
from types import TracebackType
from typing import Any

Excepthook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]

USAGE = """usage: loopscope COMMAND ...

  loopscope run EXPERIMENT   train an experiment, with hooks; --help shows its options
  loopscope resume RUN       go on with a run that was interrupted
  loopscope diff RUN RUN     say at which step and in which tensor two runs part
  loopscope plot RUN...      draw metrics of runs against steps
  loopscope replay RUN       send the metrics of a finished run to W&B or TensorBoard
  loopscope list             the experiments, their strategies and presets
  loopscope hooks            all hooks, one line each
  loopscope hooks NAME       every metric and option of a hook
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
    # Only now: this imports torch, which takes about two seconds.
    from .command import run_command

    return run_command(words, packages)


def without_traceback(before: Excepthook) -> Excepthook:
    """Return an ``excepthook`` that refuses bad input, such as two hooks of one name in a script, in one line."""

    def excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        from ..errors import UsageError
        from .command import refused

        if isinstance(error, UsageError):
            raise SystemExit(refused(error))
        before(kind, error, trace)

    return excepthook


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
