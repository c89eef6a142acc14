"""Hooks that explain a step: the history of its quantities, and variants of the step."""

from .step_history import StepHistory
from .what_if import WhatIf

__all__ = ["StepHistory", "WhatIf"]
