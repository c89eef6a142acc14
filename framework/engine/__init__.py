"""Hook calls of a run: schedules, isolated calls, failures, metric delivery, and the loop that triggers them."""

from .commits import CommitRecord
from .driver import Driver
from .error_advice import unmet_need
from .evaluation_dropout import WITH_FAST_PATH
from .log import log
from .manager import HookManager
from .model_context import ModelContext

__all__ = ["WITH_FAST_PATH", "CommitRecord", "Driver", "HookManager", "ModelContext", "log", "unmet_need"]
