"""Standard output as a rich console."""

import sys

from rich.console import Console


def make_console() -> Console:
    """Return a console on standard output that writes control codes to terminals only, whatever the environment."""
    return Console(force_terminal=None if sys.stdout.isatty() else False, highlight=False)
