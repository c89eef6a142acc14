"""Simulation of low-precision training: layers whose matrix products use narrow number formats."""

from .conversion import dequantize_model, layers_to_quantize, quantize_model
from .linear import BitLinear, quantized_modules
from .matrices import has_weight_parameter, castable_matrices
from .metis import (
    Decomposition, Gains, MetisOptions, layers_with_factors, low_rank_cast, split_weight
)
from .recipes import RECIPES, ROLES, Recipe, find_recipe
from .regularizer import OFFSET, RangePenalty, penalised_matrices

__all__ = [
    "OFFSET", "RECIPES", "ROLES", "BitLinear", "Decomposition", "Gains", "MetisOptions",
    "RangePenalty", "Recipe", "castable_matrices", "dequantize_model",
    "find_recipe", "has_weight_parameter", "layers_to_quantize", "layers_with_factors", "low_rank_cast",
    "penalised_matrices", "quantize_model", "quantized_modules", "split_weight",
]
