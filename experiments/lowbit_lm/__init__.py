"""A small language model, trained with every low-bit recipe."""

from .runner import LowbitLMRunner

__all__ = ["LowbitLMRunner"]
