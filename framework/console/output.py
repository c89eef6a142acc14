"""Standard output as a rich console."""

import os
import sys

from rich.console import Console


class LastingConsole(Console):
    """A console that outlives its reader: where rich exits as a pipe is closed, this one is quiet from then on."""

    def on_broken_pipe(self) -> None:
        """Write to nowhere, so that nothing fails again, not even the last flush of the process."""
        self.quiet = True
        if self.file is sys.stdout:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, sys.stdout.fileno())
            os.close(nowhere)


def make_console() -> Console:
    """Return a console on standard output that writes control codes to terminals only, whatever the environment."""
    return LastingConsole(force_terminal=None if sys.stdout.isatty() else False, highlight=False)


def can_be_taken(console: Console) -> bool:
    """Tell whether a console is a terminal that can be drawn on: no pipe, no dumb one, none of an old Windows."""
    return (
        console.is_terminal and console.is_interactive and not console.is_dumb_terminal and not console.legacy_windows
    )
