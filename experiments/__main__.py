"""The command ``loopscope``: fills the registries of hooks, sinks and experiments, then hands over."""

import sys

import experiments
import sinks
import training_hooks
from framework.cli import main as command

FILLED = (experiments, sinks, training_hooks)


def main() -> int:
    """Run the command line and return its exit status."""
    return command()


if __name__ == "__main__":
    sys.exit(main())
