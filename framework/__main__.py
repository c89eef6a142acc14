"""Entry point of the command ``loopscope``: fills the registries of hooks, sinks and experiments, then runs the CLI."""

import os
import sys

from .interruption import end_at_signals, end_process, ignore_signal, raise_by_default

IS_PROGRAM = __name__ == "__main__" or os.path.basename("".join(sys.argv[:1])).partition(".")[0] == "loopscope"
"""Whether this process is the command, and not a script that imports this module."""
end_at_signals()  # before the other imports, during which Ctrl-C would print a traceback

import signal  # noqa: E402

from . import cli  # noqa: E402
from .cli import STDERR, STDOUT, lost_output, outlast_readers, without_traceback  # noqa: E402

PACKAGES = ("loopscope.experiments", "loopscope.sinks", "loopscope.training_hooks")


def main() -> int:
    """Run the command line and return its exit status; a broken pipe never crashes a run."""
    end_at_signals()
    try:
        return _run()
    except KeyboardInterrupt:
        end_process(signal.SIGINT)
    finally:
        if IS_PROGRAM:
            end_at_signals()  # during the shutdown of the interpreter
        else:
            raise_by_default()


def _run() -> int:
    sys.stdout, sys.stderr = outlast_readers(STDOUT, sys.stdout), outlast_readers(STDERR, sys.stderr)
    if hasattr(signal, "SIGUSR1") and signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL:
        # By default SIGUSR1 ends a process, but a checkpoint request before the start of a run must not.
        signal.signal(signal.SIGUSR1, ignore_signal)
    status = cli.main(packages=PACKAGES)
    if reason := lost_output(sys.stdout):
        sys.stderr.write(f"loopscope: standard output could not be written: {reason}.\n")
        return status or 1
    return status


sys.excepthook = without_traceback(sys.excepthook)  # scripts that define hooks import this module first
if not IS_PROGRAM:
    raise_by_default()  # the script handles signals itself until it calls main()

if __name__ == "__main__":
    sys.exit(main())
