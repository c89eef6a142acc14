"""Console output of a run: headers, progress, full-screen display, tables, warnings."""

from typing import TYPE_CHECKING

from ..names_on_demand import names_on_demand
from ..preserved_streams import preserved_streams

with preserved_streams():
    import rich.style  # noqa: F401  # draws from Python's generator when it is imported: before all other imports of rich

if TYPE_CHECKING:
    from .board import Board, Groups, Label
    from .frame import newest_table, snapshot_line
    from .progress import NotebookOutput
    from .run_console import Mode, RunConsole, watch
    from .runs_line import MARK, RunsLine, ProgressMessages
    from .tables import budget_text, final_numbers, lost_rows_text, place_text, result_line, split_columns
    from .terminal import make_console, show_warnings
    from .text import duration_text, in_columns, number_text, printable, shortened, value_text
else:
    __getattr__ = names_on_demand(__name__)

__all__ = [
    "MARK", "Board", "Groups", "Label", "Mode", "NotebookOutput", "ProgressMessages", "RunConsole", "RunsLine",
    "budget_text", "duration_text", "final_numbers", "in_columns", "lost_rows_text", "make_console", "newest_table",
    "number_text", "place_text", "printable", "result_line", "shortened", "show_warnings", "snapshot_line",
    "split_columns", "value_text", "watch",
]
