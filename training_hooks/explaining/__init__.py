"""What led to a step: the quantities of the steps before it, and the same step taken in other ways."""

from .step_history import StepHistory
from .what_if import WhatIf

__all__ = ["StepHistory", "WhatIf"]
