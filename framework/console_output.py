"""Standard output as a rich console."""

import sys

from rich.console import Console


def make_console() -> Console:
    """Return a console on standard output that writes control codes to terminals only, whatever the environment."""
    return Console(force_terminal=None if sys.stdout.isatty() else False, highlight=False)


def can_be_taken(console: Console) -> bool:
    """Tell whether a console is a terminal that can be drawn on: no pipe, no dumb one, none of an old Windows."""
    return (
        console.is_terminal and console.is_interactive and not console.is_dumb_terminal and not console.legacy_windows
    )
