"""Hooks that keep copies of the weights: smoothing and averages."""

from .smoothing import ModelSmoother, ModelSmoothing, SmoothingConfig
from .weight_average import WeightAverage

__all__ = ["ModelSmoother", "ModelSmoothing", "SmoothingConfig", "WeightAverage"]
