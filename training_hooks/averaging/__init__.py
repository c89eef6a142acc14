"""Copies of the weights beside the run."""

from .smoothing import ModelSmoother, ModelSmoothing, SmoothingConfig
from .weight_average import WeightAverage

__all__ = ["ModelSmoother", "ModelSmoothing", "SmoothingConfig", "WeightAverage"]
