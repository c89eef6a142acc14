"""One optimizer step, and what can be measured of a loss."""

from .compilation import compile_model, eagerly, is_compiled, quiet_graph_breaks
from .loss_probe import METHODS, LossProbe, Method
from .profiler import Profiler
from .train_step import (
    Precision, TrainingTask, borrowed_scaler, forward_backward, is_skipped, measure_gradients, update
)

__all__ = [
    "METHODS", "LossProbe", "Method", "Precision", "Profiler", "TrainingTask", "borrowed_scaler", "compile_model",
    "eagerly", "forward_backward", "is_compiled", "is_skipped", "measure_gradients", "quiet_graph_breaks", "update",
]
