"""Mathematics that several rooms of hooks share."""

from .conditions import Conditions
from .flat_shards import FlatLayout, FlatMemory, FlatVector, laid_out_like, meshes_of, over_ranks
from .flat_vectors import FlatSpace
from .shadow_copies import ShadowCopies
from .smoothing import ModelSmoother, SmoothingConfig, blend_buffers, distance
from .spectra import effective_rank, leading_share, participation_ratio, stable_rank
from .weight_averages import WeightAverage, averaged_state_dict

__all__ = [
    "Conditions",
    "FlatLayout",
    "FlatMemory",
    "FlatSpace",
    "FlatVector",
    "ModelSmoother",
    "ShadowCopies",
    "SmoothingConfig",
    "WeightAverage",
    "averaged_state_dict",
    "blend_buffers",
    "distance",
    "effective_rank",
    "laid_out_like",
    "leading_share",
    "meshes_of",
    "over_ranks",
    "participation_ratio",
    "stable_rank",
]
