"""Mathematics and helpers shared by several packages of hooks."""

from .alerts import Alerts, notice
from .complex_parameters import refuse_complex
from .drawn_rows import drawn_loader
from .flat_vectors import FlatLayout, FlatMemory, FlatSpace, FlatVector, sharded_like, stacked
from .jackknife import jackknife_variance
from .missing_rates import refuse_missing_rates
from .series_budget import FamilyFile, SeriesBudget
from .series_families import Families, on_host, reported_series
from .shared_results import (
    compute_once, gradient_norms, joint_gradient_norm, joint_weight_norm, weight_norms,
)
from .skipped_steps import is_overflowed
from .spectra import (
    effective_rank, entropy_of_shares, gini, leading_share, participation_ratio, singular_values, smaller_gram,
    stable_rank,
)
from .splitmix import splitmix64
from .index_samples import spread_indices
from .weight_copies import WeightCopy, WeightMemory

__all__ = [
    "Alerts", "Families", "FamilyFile", "FlatLayout", "FlatMemory", "FlatSpace", "FlatVector", "SeriesBudget",
    "WeightCopy", "WeightMemory", "compute_once", "drawn_loader", "effective_rank", "entropy_of_shares", "gini",
    "gradient_norms", "is_overflowed", "jackknife_variance", "joint_gradient_norm", "joint_weight_norm",
    "leading_share", "notice", "on_host", "participation_ratio",
    "refuse_complex", "refuse_missing_rates", "reported_series", "sharded_like", "singular_values", "smaller_gram",
    "splitmix64", "spread_indices", "stable_rank", "stacked", "weight_norms",
]
