"""The gate through which hooks are called, its guards, and what is borrowed and put back."""

from .borrowing import (
    borrowed_buffers, borrowed_extras, borrowed_for_evaluation, borrowed_gradients, borrowed_learning_rates,
    borrowed_modes, borrowed_weights,
)
from .gate import Call, Isolation
from .guardian import LightSnapshot, Snapshot

__all__ = [
    "Call", "Isolation", "LightSnapshot", "Snapshot", "borrowed_buffers", "borrowed_extras", "borrowed_for_evaluation",
    "borrowed_gradients", "borrowed_learning_rates", "borrowed_modes", "borrowed_weights",
]
