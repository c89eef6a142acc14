"""The laboratory: changes of a training that branches try, the statistics of their effects, and the verdicts."""

from .changes import BRANCH_TITLES, CHANGES, UNCHANGED, Change
from .effects import LARGEST_RISE, Effect, effect_of
from .verdict import ChangeTest

__all__ = ["BRANCH_TITLES", "CHANGES", "LARGEST_RISE", "UNCHANGED", "Change", "ChangeTest", "Effect", "effect_of"]
