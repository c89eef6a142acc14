"""One fire: who is due, called through the gate, its metrics on their way; and the transitions at which it comes."""

from .driver import Driver
from .manager import HookManager
from .remedies import unmet

__all__ = ["Driver", "HookManager", "unmet"]
