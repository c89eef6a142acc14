"""Layers with narrow matrices."""

from .casts import Cast, largest_magnitudes
from .conversion import layers_to_quantize, quantize_model
from .counts import MAXIMA, SUMS, Counts
from .formats import FloatFormat, FormatRegistry
from .kernels import Scaling, as_float32, delayed, scales_for
from .layout import Layout
from .linear import BitLinear
from .metis import Decomposition, Gains, MetisOptions
from .recipes import RECIPES, Recipe, find_recipe
from .regularizer import OFFSET, RangePenalty, penalised, share
from .roles import ROLES
from .scaling import RuleRegistry
from .splitting import LowRankFactors, layers_with_factors, split_weight

__all__ = [
    "MAXIMA",
    "OFFSET",
    "RECIPES",
    "ROLES",
    "SUMS",
    "BitLinear",
    "Cast",
    "Counts",
    "Decomposition",
    "FloatFormat",
    "FormatRegistry",
    "Gains",
    "Layout",
    "LowRankFactors",
    "MetisOptions",
    "RangePenalty",
    "Recipe",
    "RuleRegistry",
    "Scaling",
    "as_float32",
    "delayed",
    "find_recipe",
    "largest_magnitudes",
    "layers_to_quantize",
    "layers_with_factors",
    "penalised",
    "quantize_model",
    "scales_for",
    "share",
    "split_weight",
]
