"""Hooks that read the forward pass of the training: sizes of activations, and the origin of non-finite values."""

from .activations import Activations
from .first_nonfinite import FirstNonfinite

__all__ = ["Activations", "FirstNonfinite"]
