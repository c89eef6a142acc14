"""Hooks that measure the movement of the weights and the updates of the optimizer."""

from .adam_dynamics import AdamDynamics
from .matrix_updates import MatrixUpdates
from .optimizer_health import OptimizerHealth
from .parameter_delta import ParameterDelta
from .parameter_norms import ParameterNorms
from .path_length import PathLength
from .update_monitor import WeightUpdateMonitor
from .weight_tracking import WeightTracking
from .weight_updates import WeightUpdates

__all__ = [
    "AdamDynamics", "MatrixUpdates", "OptimizerHealth", "ParameterDelta", "ParameterNorms", "PathLength",
    "WeightTracking", "WeightUpdateMonitor", "WeightUpdates",
]
