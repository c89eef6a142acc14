"""Hook calls of a run: schedules, isolated calls, failures, metric delivery, and the loop that triggers them."""

from .budget import BUDGET, THINNING, BudgetSettings, Decisions
from .commits import CommitRecord
from .driver import Driver
from .error_advice import unmet_need
from .log import log
from .manager import HookManager
from .model_context import ModelContext

__all__ = [
    "BUDGET", "THINNING", "BudgetSettings", "CommitRecord", "Decisions", "Driver", "HookManager", "ModelContext",
    "log", "unmet_need",
]
