"""Explanation of a spike: the first unusual quantity, branches of that step, and a verdict."""

from .explanation import Explanation, explain
from .rows import rows_by_step
from .explanation_text import row_table, explanation_lines

__all__ = ["Explanation", "explain", "explanation_lines", "row_table", "rows_by_step"]
