"""Copies of the weights beside the run."""

from .model_smoothing import ModelSmoothing
from .smoothing import ModelSmoother, SmoothingConfig
from .weight_average import WeightAverage

__all__ = ["ModelSmoother", "ModelSmoothing", "SmoothingConfig", "WeightAverage"]
