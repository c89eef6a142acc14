"""The experiments that come with loopscope; importing this package fills the registry."""

from experiments.lowbit_lm.runner import LowbitLMRunner
from experiments.mod_arithmetic.runner import ModArithmeticRunner
from experiments.tied_lm.runner import TiedLMRunner

__all__ = ["LowbitLMRunner", "ModArithmeticRunner", "TiedLMRunner"]
