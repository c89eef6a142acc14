"""The experiments that come with loopscope; importing this package fills the registry."""

from experiments.mod_arithmetic.runner import ModArithmeticRunner

__all__ = ["ModArithmeticRunner"]
