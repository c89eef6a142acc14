"""The experiments that come with loopscope; importing this package fills the registry."""

from .lowbit_lm import LowbitLMRunner
from .mod_arithmetic import ModArithmeticRunner
from .tied_lm import TiedLMRunner

__all__ = ["LowbitLMRunner", "ModArithmeticRunner", "TiedLMRunner"]
