"""What people see in a terminal."""

from .board import Board, Groups, hooks_described, parted, shown_metrics
from .grid import ARROW_STYLES, HEADING_STYLE, Cell, Group, brief, fitted, flattened
from .lines import Line, as_text, printable, width_of
from .notices import Label, show_warnings
from .output import make_console
from .run_console import Mode, RunConsole, print_experiments, print_hook, print_hooks
from .text import number_text, value_text

__all__ = [
    "ARROW_STYLES",
    "HEADING_STYLE",
    "Board",
    "Cell",
    "Group",
    "Groups",
    "Label",
    "Line",
    "Mode",
    "RunConsole",
    "as_text",
    "brief",
    "fitted",
    "flattened",
    "hooks_described",
    "make_console",
    "number_text",
    "parted",
    "print_experiments",
    "print_hook",
    "print_hooks",
    "printable",
    "show_warnings",
    "shown_metrics",
    "value_text",
    "width_of",
]
