"""The same epoch in another order."""

from .counterfactual import Counterfactual
from .counterfactual_validator import CounterfactualValidator

__all__ = ["Counterfactual", "CounterfactualValidator"]
