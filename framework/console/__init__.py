"""What people see of a run in a terminal, a pipe or a log: headers, a bar or the whole screen, tables, warnings."""

from .board import Board, Groups, Label
from .frame import newest_table, snapshot_line
from .run_console import Mode, RunConsole
from .tables import experiment_list, first_line, hook_list, hook_page
from .terminal import make_console, show_warnings
from .text import printable

__all__ = [
    "Board", "Groups", "Label", "Mode", "RunConsole", "experiment_list", "first_line", "hook_list", "hook_page",
    "make_console", "newest_table", "printable", "show_warnings", "snapshot_line",
]
