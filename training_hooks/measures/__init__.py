"""Mathematics that several rooms of hooks share."""

from .conditions import Conditions
from .critical_sharpness import critical_infos, gradient_metrics, update_metrics
from .entanglement import (
    Departure,
    Trail,
    approximation,
    curvature_along,
    entanglement_metrics,
    own_step_metrics,
    placed_like,
    preconditioned_curvature,
    solution_metrics,
)
from .flat_shards import FlatLayout, FlatMemory, FlatVector, laid_out_like, meshes_of, over_ranks
from .flat_vectors import FlatSpace
from .lanczos import Density, Product, Tridiagonal, lanczos, mean_and_error, rademacher, residuals
from .measured_loss import MeasuredLoss, refuse_exact_under_fsdp, spread_batches
from .shadow_copies import ShadowCopies
from .smoothing import ModelSmoother, SmoothingConfig, blend_buffers, distance
from .spectra import effective_rank, leading_share, participation_ratio, stable_rank
from .stability import adam_preconditioner, stability_threshold
from .weight_averages import WeightAverage, averaged_state_dict

__all__ = [
    "Conditions",
    "Density",
    "Departure",
    "FlatLayout",
    "FlatMemory",
    "FlatSpace",
    "FlatVector",
    "MeasuredLoss",
    "ModelSmoother",
    "Product",
    "ShadowCopies",
    "SmoothingConfig",
    "Trail",
    "Tridiagonal",
    "WeightAverage",
    "adam_preconditioner",
    "approximation",
    "averaged_state_dict",
    "blend_buffers",
    "critical_infos",
    "curvature_along",
    "distance",
    "effective_rank",
    "entanglement_metrics",
    "gradient_metrics",
    "laid_out_like",
    "lanczos",
    "leading_share",
    "mean_and_error",
    "meshes_of",
    "over_ranks",
    "own_step_metrics",
    "participation_ratio",
    "placed_like",
    "preconditioned_curvature",
    "rademacher",
    "refuse_exact_under_fsdp",
    "residuals",
    "solution_metrics",
    "spread_batches",
    "stability_threshold",
    "stable_rank",
    "update_metrics",
]
