"""Hooks of the laboratory: the history of all quantities, variants of one step, and branches with one change."""

from .hypothesis_test import HypothesisTest
from .step_history import StepHistory
from .what_if import WhatIf

__all__ = ["HypothesisTest", "StepHistory", "WhatIf"]
