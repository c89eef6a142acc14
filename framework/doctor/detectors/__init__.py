"""The detectors that come with loopscope, by subject."""

from .parameters import DecayedVectors, FrozenInOptimizer, WithoutOptimizer

__all__ = ["DecayedVectors", "FrozenInOptimizer", "WithoutOptimizer"]
