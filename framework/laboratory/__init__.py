"""The laboratory: changes of a training that branches try, the statistics of their effects, and the verdicts."""

from .change_tests import ChangeTest
from .effects import LARGEST_RISE, Effect, effect_of
from .hypotheses import HYPOTHESES, Hypothesis

__all__ = ["HYPOTHESES", "LARGEST_RISE", "ChangeTest", "Effect", "Hypothesis", "effect_of"]
