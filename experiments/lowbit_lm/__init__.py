"""A small language model under every low-bit recipe."""

from .runner import LowbitLMRunner

__all__ = ["LowbitLMRunner"]
