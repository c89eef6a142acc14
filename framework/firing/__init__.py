"""One fire: who is due, called through the gate, its metrics on their way."""

from .fire import GradientKeeper
from .manager import HookManager

__all__ = ["GradientKeeper", "HookManager"]
