"""Hooks about losses of low-precision number formats."""

from .gradient_overflow import GradientOverflow
from .metis_split import MetisSplit
from .range_penalty import RangePenaltyReport

__all__ = ["GradientOverflow", "MetisSplit", "RangePenaltyReport"]
