"""Hooks about curvature and step sizes."""

from .hessian import Hessian
from .lr_probe import LrProbe, coming_batches, parts_in
from .sharpness import Sharpness

__all__ = ["Hessian", "LrProbe", "Sharpness", "coming_batches", "parts_in"]
