"""Layers with narrow matrices."""

from .conversion import dequantize_model, layers_to_quantize, quantize_model
from .linear import BitLinear, QuantizationTap, Quantized, quantized_modules
from .matrices import has_own_weight, known_matrices
from .metis import (
    Decomposition, Gains, LowRankFactors, MetisOptions, layers_with_factors, low_rank_cast, split_weight
)
from .recipes import RECIPES, ROLES, Recipe, find_recipe
from .regularizer import OFFSET, RangePenalty, penalised

__all__ = [
    "OFFSET", "RECIPES", "ROLES", "BitLinear", "Decomposition", "Gains", "LowRankFactors", "MetisOptions",
    "QuantizationTap", "Quantized", "RangePenalty", "Recipe", "dequantize_model", "find_recipe", "has_own_weight",
    "known_matrices", "layers_to_quantize", "layers_with_factors", "low_rank_cast", "penalised", "quantize_model",
    "quantized_modules", "split_weight",
]
