"""(a + b) mod p by a small transformer."""

from .runner import ModArithmeticRunner

__all__ = ["ModArithmeticRunner"]
