"""The gate that isolates hooks from the run: its checks, state copies and temporary changes of the training state."""

from .borrowing import (
    borrowed_extras,
    borrowed_gradients,
    borrowed_group_options,
    borrowed_modes,
    borrowed_weights,
    suspended_accumulation_hooks,
)
from .engine_callbacks import current_pass
from .gate import VISITS, Call, Isolation, is_in_visit, is_shipped
from .guardian import LightStateCopy, StateCopy
from .undone import undone_in_modules, undone_pass

__all__ = [
    "VISITS", "Call", "Isolation", "LightStateCopy", "StateCopy", "borrowed_extras", "borrowed_gradients",
    "borrowed_group_options", "borrowed_modes", "borrowed_weights", "current_pass", "is_in_visit",
    "is_shipped", "suspended_accumulation_hooks", "undone_in_modules", "undone_pass",
]
