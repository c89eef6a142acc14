"""The laboratory: changes of a training that branches try, the statistics of their effects, and the verdicts."""

from typing import TYPE_CHECKING

from ..names_on_demand import names_on_demand

if TYPE_CHECKING:
    from .changes import CHANGES, UNCHANGED, TrialChange
    from .effects import LARGEST_RISE, Effect, effect_of, rises_by_chance
    from .explained_step import FIELDS, Explanation
    from .verdict import ChangeTest
else:
    __getattr__ = names_on_demand(__name__)

__all__ = [
    "CHANGES", "FIELDS", "LARGEST_RISE", "UNCHANGED", "ChangeTest", "Effect", "Explanation", "TrialChange", "effect_of",
    "rises_by_chance",
]
