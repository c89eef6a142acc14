"""Hooks that measure gradients: their size, agreement, noise and flow between blocks."""

from .batch_dynamics import BatchDynamics
from .consecutive import Consecutive
from .gradient_flow import GradientFlow, find_chains
from .gradient_noise_scale import GradientNoiseScale
from .gradient_projection import GradientProjection
from .norms import Norms
from .subspace_gradient_info import SubspaceGradientInfo
from .variance import Variance

__all__ = [
    "BatchDynamics", "Consecutive", "GradientFlow", "GradientNoiseScale", "GradientProjection", "Norms",
    "SubspaceGradientInfo", "Variance", "find_chains",
]
