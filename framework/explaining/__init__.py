"""What left its history first before a spike, what each way of taking that step shows, and the verdict on both."""

from .explanation import Explanation, explain
from .rows import rows_by_step
from .telling import rows_told, told

__all__ = ["Explanation", "explain", "rows_by_step", "rows_told", "told"]
