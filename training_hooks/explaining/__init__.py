"""Hooks that explain a step: the history of its quantities, variants of the step, and branches with one change."""

from .hypothesis_test import HypothesisTest
from .step_history import StepHistory
from .what_if import WhatIf

__all__ = ["HypothesisTest", "StepHistory", "WhatIf"]
