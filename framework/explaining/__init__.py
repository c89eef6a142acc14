"""Explanation of a spike: unusual quantities, branches of that step, and a verdict; tests of a run's findings."""

from .explanation import Explanation, explain
from .rows import rows_by_step
from .explanation_text import row_table, explanation_lines
from .run_trials import try_changes

__all__ = ["Explanation", "explain", "explanation_lines", "row_table", "rows_by_step", "try_changes"]
