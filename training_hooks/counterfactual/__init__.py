"""Hooks that retrain an epoch in other data orders."""

from .counterfactual import Counterfactual
from .counterfactual_validator import CounterfactualValidator

__all__ = ["Counterfactual", "CounterfactualValidator"]
