"""Sums over the tokens of a module's output, by unit, and the statistics that follow from them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from loopscope.tensors import is_readable, unsharded
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..measures import spread_indices

MASSIVE_MAGNITUDE, MASSIVE_RATIO = 100.0, 1000.0
"""An element is massive if its magnitude exceeds both the first and the second times the median (arXiv 2402.17762)."""
DEAD_RANGE = 1e-6  # of the layer's largest magnitude: a unit that varies less is constant up to rounding
MEDIAN_SAMPLE = 16_384
IMAGE_DIMENSIONS = 4


def tokens_by_units(output: object) -> Tensor | None:
    """Return the first floating-point tensor of a module's output with shape (tokens, units).

    Units are the last dimension, or the channels (dimension 1) of a tensor with four or more dimensions.
    """
    floats = (leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point())
    first = next(floats, None)
    if first is None or not first.ndim or not first.numel():
        return None
    values = unsharded(first)
    if values.ndim >= IMAGE_DIMENSIONS:
        values = values.movedim(1, -1)
    return values.reshape(-1, values.shape[-1])


@dataclass
class UnitSums:
    """Sums over the tokens of a module's output x, of shape (tokens, units): float64 vectors of shape (units,)."""

    squares: Tensor
    """Σ x²."""
    magnitudes: Tensor
    """Σ |x|."""
    highest: Tensor
    """max x."""
    highest_negative: Tensor
    """max −x."""
    counts: Tensor
    """Tokens, non-finite elements, massive elements: a float64 vector (3,)."""

    @classmethod
    def of(cls, values: Tensor) -> "UnitSums":
        """Return the sums of one tensor of shape (tokens, units), in any floating-point dtype."""
        wide = values if values.dtype in (torch.float32, torch.float64) else values.float()
        magnitudes = wide.abs()
        highest, lowest = wide.amax(0), wide.amin(0)
        # x² of float32 overflows above 2^64 and vanishes below 2^-75, so that x is divided by its largest magnitude.
        largest = torch.maximum(highest, -lowest).amax()
        scale = torch.where(largest > 0, largest, 1.0)
        median = _sample(magnitudes).median()
        limit = torch.clamp(median * MASSIVE_RATIO, min=MASSIVE_MAGNITUDE)
        tokens = torch.full_like(limit, len(wide))
        # In place, since new memory of this size costs more than the arithmetic.
        scaled = magnitudes.div_(scale)
        scaled_sums = scaled.sum(0)
        nonfinite = _count(lambda: ~wide.isfinite(), ~scaled_sums.isfinite().all())
        massive = _count(lambda: wide.abs() > limit, ~(largest <= limit))  # also if the largest is NaN
        return cls(
            scaled.square_().sum(0).double() * scale.double().square(),
            scaled_sums.double() * scale.double(),
            highest.double(),
            -lowest.double(),
            torch.stack([tokens, nonfinite.to(limit), massive.to(limit)]).double(),
        )

    @classmethod
    def empty(cls, units: int, device: torch.device) -> "UnitSums":
        """Return the sums over no tokens."""
        zeros = torch.zeros(units, dtype=torch.float64, device=device)
        return cls(zeros, zeros, zeros - torch.inf, zeros - torch.inf, zeros.new_zeros(3))

    def add(self, other: "UnitSums") -> "UnitSums":
        """Return the sums over the tokens of both."""
        return UnitSums(
            self.squares + other.squares,
            self.magnitudes + other.magnitudes,
            torch.maximum(self.highest, other.highest),
            torch.maximum(self.highest_negative, other.highest_negative),
            self.counts + other.counts,
        )

    @property
    def totals(self) -> list[Tensor]:
        """The tensors that are added over ranks."""
        return [self.squares, self.magnitudes, self.counts]

    @property
    def extremes(self) -> list[Tensor]:
        """The tensors of which ranks take the maximum."""
        return [self.highest, self.highest_negative]

    @classmethod
    def joined(cls, totals: Sequence[Tensor], extremes: Sequence[Tensor]) -> "UnitSums":
        """Return the sums with these :attr:`totals` and :attr:`extremes`."""
        squares, magnitudes, counts = totals
        highest, highest_negative = extremes
        return cls(squares, magnitudes, highest, highest_negative, counts)


def _sample(magnitudes: Tensor) -> Tensor:
    """Return at most ``MEDIAN_SAMPLE`` elements, whose places have no period in common with the units."""
    flat = magnitudes.flatten()
    if len(flat) <= MEDIAN_SAMPLE:
        return flat
    return flat[_places(len(flat), flat.device)]


@lru_cache(maxsize=64)
def _places(count: int, device: torch.device) -> Tensor:
    return spread_indices(count, MEDIAN_SAMPLE).to(device)


def _count(flags: Callable[[], Tensor], may_be_set: Tensor) -> Tensor:
    """Return how many flags are set, without computing them if the host can read that none ``may_be_set``."""
    if is_readable(may_be_set) and not may_be_set:
        return torch.zeros((), dtype=torch.int64)
    return flags().count_nonzero()


def root_mean_square(sums: UnitSums) -> Tensor:
    """Return √(mean x²) over all tokens and units."""
    return (sums.squares.mean() / sums.counts[0]).sqrt()


def nonfinite_fraction(sums: UnitSums) -> Tensor:
    """Return the share of infinite and NaN elements."""
    return sums.counts[1] / (sums.counts[0] * len(sums.squares))


def massive_count(sums: UnitSums) -> Tensor:
    """Return the number of massive elements."""
    return sums.counts[2]


def largest_magnitude(sums: UnitSums) -> Tensor:
    """Return max |x|; NaN if an element is NaN."""
    return torch.maximum(sums.highest, sums.highest_negative).amax()


def outlier_kurtosis(sums: UnitSums) -> Tensor:
    """Return mean_j s_j⁴ / (mean_j s_j²)², s_j the root mean square of unit j over tokens (arXiv 2405.19279).

    1: all units have equal size; the number of units: one unit has everything. NaN if all elements are zero.

    >>> outlier_kurtosis(UnitSums.of(torch.tensor([[1.0, 1.0, 1.0, 1.0], [-1.0, 1.0, 1.0, 1.0]])))
    tensor(1., dtype=torch.float64)
    """
    shares = sums.squares / sums.squares.amax()
    kurtosis: Tensor = shares.square().mean() / shares.mean().square()
    return kurtosis


def dormant_fraction(sums: UnitSums, threshold: float) -> Tensor:
    """Return the share of units with mean |x_j| ≤ threshold × its mean over all units (arXiv 2302.12902)."""
    is_dormant = sums.magnitudes <= threshold * sums.magnitudes.mean()
    return _fraction(is_dormant, sums)


def dead_fraction(sums: UnitSums) -> Tensor:
    """Return the share of units that have one value, such as 0 or a saturated 1, for all tokens; NaN for one token."""
    spread = sums.highest + sums.highest_negative
    fraction = _fraction(spread <= DEAD_RANGE * largest_magnitude(sums), sums)
    return torch.where(sums.counts[0] > 1, fraction, torch.nan)


def _fraction(flags: Tensor, sums: UnitSums) -> Tensor:
    """Return the mean of flags; NaN if an element is not finite, since comparisons with NaN are false."""
    return torch.where(sums.counts[1] > 0, torch.nan, flags.double().mean())
