"""Simulated casts of tensors: formats, scaling rules, rounding, and counts of the losses."""

from .casts import Cast, largest_magnitudes, refuse_fractions, refuse_other_types
from .counts import MAXIMA, SUMS, Counts, QuantizationListener
from .formats import FloatFormat, FormatRegistry
from .kernels import Layout, as_float32, computable, delayed, limits_for, scales_for, zero_padded
from .scaling import RuleRegistry, ScalingRule, covering

__all__ = [
    "MAXIMA", "SUMS", "Cast", "Counts", "FloatFormat", "FormatRegistry", "Layout", "QuantizationListener",
    "RuleRegistry", "ScalingRule", "as_float32", "computable", "covering", "delayed", "largest_magnitudes",
    "limits_for", "refuse_fractions", "refuse_other_types", "scales_for", "zero_padded",
]
