"""Parameter groups of optimizers, which may be split by device mesh, and their options as plain numbers."""

from .groups import (
    SPLIT_FROM, groups_of, moments_of, original_groups, parameters_of, regrouped, split_groups, trained_by,
)
from .options import betas_of, learning_rate_of, number_or, rounds_stochastically

__all__ = [
    "SPLIT_FROM", "betas_of", "groups_of", "learning_rate_of", "moments_of", "number_or", "original_groups",
    "parameters_of", "regrouped", "rounds_stochastically", "split_groups", "trained_by",
]
