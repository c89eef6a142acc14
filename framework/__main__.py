"""The command ``loopscope``: fills the registries of hooks, sinks and experiments, then hands over."""

import sys

from . import cli
from .cli import without_traceback

PACKAGES = ("loopscope.experiments", "loopscope.sinks", "loopscope.training_hooks")


def main() -> int:
    """Run the command line and return its exit status."""
    return cli.main(packages=PACKAGES)


sys.excepthook = without_traceback(sys.excepthook)  # scripts that define hooks import this module first

if __name__ == "__main__":
    sys.exit(main())
