"""What people see of a run in a terminal, a pipe or a log: headers, a bar or the whole screen, tables, warnings."""

from .board import Board, Groups
from .newest import newest_lines, newest_table
from .notices import Label, show_warnings
from .run_console import Mode, RunConsole, print_experiments, print_hook, print_hooks
from .terminal import make_console

__all__ = [
    "Board",
    "Groups",
    "Label",
    "Mode",
    "RunConsole",
    "make_console",
    "newest_lines",
    "newest_table",
    "print_experiments",
    "print_hook",
    "print_hooks",
    "show_warnings",
]
