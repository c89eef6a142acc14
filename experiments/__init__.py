"""The experiments of loopscope; importing this package registers them."""

from .grokking import GrokkingConfig, GrokkingRunner
from .lowbit_lm import LowbitLMRunner
from .mod_arithmetic import ModArithmeticRunner
from .tied_lm import TiedLMRunner

__all__ = ["GrokkingConfig", "GrokkingRunner", "LowbitLMRunner", "ModArithmeticRunner", "TiedLMRunner"]
