"""Measurements that show the common mistakes of training scripts."""

from .training_checks import TrainingChecks

__all__ = ["TrainingChecks"]
