"""The gate that isolates hooks from the run: its checks, snapshots and temporary changes of the training state."""

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
