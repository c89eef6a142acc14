"""What people see in a terminal."""

from .board import MEAN, Board, Groups, Track
from .grid import ARROW_STYLES, HEADING_STYLE, Cell, Group, fitted
from .notices import Label, show_warnings
from .run_console import Mode, RunConsole, print_experiments, print_hook, print_hooks
from .terminal import make_console
from .text import Line, Lines, printable

__all__ = [
    "ARROW_STYLES",
    "HEADING_STYLE",
    "MEAN",
    "Board",
    "Cell",
    "Group",
    "Groups",
    "Label",
    "Line",
    "Lines",
    "Mode",
    "RunConsole",
    "Track",
    "fitted",
    "make_console",
    "print_experiments",
    "print_hook",
    "print_hooks",
    "printable",
    "show_warnings",
]
