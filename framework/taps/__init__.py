"""Taps of a run: their attachment to the model, the checks of their calls, and their removal."""

from .tap_set import TapSet

__all__ = ["TapSet"]
