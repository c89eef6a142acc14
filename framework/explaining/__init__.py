"""What left its history first before a spike, what each way of taking that step shows, and the verdict on both."""

from .explanation import Explanation, explain
from .telling import told

__all__ = ["Explanation", "explain", "told"]
