"""A small transformer that learns (a + b) mod p."""

from .runner import ModArithmeticRunner

__all__ = ["ModArithmeticRunner"]
