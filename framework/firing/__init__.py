"""Hook calls of a run: schedules, isolated calls, failures, metric delivery, and the loop that triggers them."""

from .driver import Driver
from .manager import HookManager
from .error_advice import unmet_need

__all__ = ["Driver", "HookManager", "unmet_need"]
