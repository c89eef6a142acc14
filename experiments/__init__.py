"""The experiments of loopscope; importing this package registers them."""

from .lowbit_lm import LowbitLMRunner
from .mod_arithmetic import ModArithmeticRunner
from .tied_lm import TiedLMRunner

__all__ = ["LowbitLMRunner", "ModArithmeticRunner", "TiedLMRunner"]
