"""Entry point of the command ``loopscope``: fills the registries of hooks, sinks and experiments, then runs the CLI."""

import os
import signal
import sys
from types import FrameType

IS_COMMAND = __name__ == "__main__" or os.path.basename(sys.argv[0]).removesuffix(".exe") == "loopscope"
"""Whether this process is the command, and not a script that imports this module."""


def end_at_once(number: int, frame: FrameType | None) -> None:
    """Handle Ctrl-C while modules are imported: a KeyboardInterrupt there gives long tracebacks, or crashes torch."""
    os.write(2, b"loopscope: interrupted.\n")
    os._exit(128 + number)


def handle_interrupts() -> None:
    """Install :func:`end_at_once` in place of Python's handler; ignored signals stay ignored."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, end_at_once)


if IS_COMMAND:
    handle_interrupts()  # before the other imports

from . import cli  # noqa: E402
from .cli import STDERR, STDOUT, lost_output, outlast_readers, without_traceback  # noqa: E402

PACKAGES = ("loopscope.experiments", "loopscope.sinks", "loopscope.training_hooks")


def main() -> int:
    """Run the command line and return its exit status; a broken pipe never crashes a run."""
    sys.stdout, sys.stderr = outlast_readers(STDOUT, sys.stdout), outlast_readers(STDERR, sys.stderr)
    if hasattr(signal, "SIGUSR1") and signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL:
        # By default SIGUSR1 ends a process, but a checkpoint request before the start of a run must not.
        signal.signal(signal.SIGUSR1, lambda number, frame: None)
    status = cli.main(packages=PACKAGES, imports_done=raise_interrupts)
    if IS_COMMAND:
        handle_interrupts()  # until the process has ended
    if reason := lost_output(sys.stdout):
        sys.stderr.write(f"loopscope: standard output could not be written: {reason}.\n")
        return status or 1
    return status


def raise_interrupts() -> None:
    """Install Python's handler, which raises KeyboardInterrupt, so that a run can end in order."""
    if signal.getsignal(signal.SIGINT) is end_at_once:
        signal.signal(signal.SIGINT, signal.default_int_handler)


sys.excepthook = without_traceback(sys.excepthook)  # scripts that define hooks import this module first

if __name__ == "__main__":
    sys.exit(main())
