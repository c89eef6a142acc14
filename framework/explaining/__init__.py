"""What left its history first before a spike, what each way of taking that step shows, and the verdict on both."""

from .departures import Departure, first_departure, read_history
from .explanation import Explanation, explain
from .telling import told
from .verdict import verdict

__all__ = ["Departure", "Explanation", "explain", "first_departure", "read_history", "told", "verdict"]
