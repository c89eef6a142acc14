"""Entry point of the command ``loopscope``: fills the registries of hooks, sinks and experiments, then runs the CLI."""

import signal
import sys

from . import cli
from .cli import STDERR, STDOUT, lost_output, outlast_readers, without_traceback

PACKAGES = ("loopscope.experiments", "loopscope.sinks", "loopscope.training_hooks")


def main() -> int:
    """Run the command line and return its exit status; a broken pipe never crashes a run."""
    sys.stdout, sys.stderr = outlast_readers(STDOUT, sys.stdout), outlast_readers(STDERR, sys.stderr)
    if hasattr(signal, "SIGUSR1") and signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL:
        # By default SIGUSR1 ends a process, but a checkpoint request before the start of a run must not.
        signal.signal(signal.SIGUSR1, lambda number, frame: None)
    status = cli.main(packages=PACKAGES)
    if reason := lost_output(sys.stdout):
        sys.stderr.write(f"loopscope: standard output could not be written: {reason}.\n")
        return status or 1
    return status


sys.excepthook = without_traceback(sys.excepthook)  # scripts that define hooks import this module first

if __name__ == "__main__":
    sys.exit(main())
