"""Taps of a run: their attachment to the model, the checks of their calls, and their removal."""

from .attention_reader import AttentionReader, attention_not_read
from .attention_tap import attention_read
from .tap_set import TapSet

__all__ = ["AttentionReader", "TapSet", "attention_not_read", "attention_read"]
