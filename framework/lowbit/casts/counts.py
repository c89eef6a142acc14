"""Counts of quantisation losses, on the device: overflow, underflow, error, and the range of the scales."""

from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ...state import InternalHook

SUMS = (
    "quantizations",
    "overflow_count",
    "total_elements",
    "total_overflow_elements",
    "underflow_elements",
    "non_finite_elements",
    "upper_half_elements",
    "excess_sum",
    "squared_error",
    "squared_norm",
)
MAXIMA = ("excess_max", "scale_max", "inverse_scale_max")


@dataclass(frozen=True)
class Counts:
    """Sums and maxima over quantisations, layers and ranks.

    Args:
        sums: float64, the last dimension has the entries of ``SUMS``; any leading shape.
        maxima: float64, the last dimension has the entries of ``MAXIMA``; 0 without quantisations.
    """

    sums: Tensor
    maxima: Tensor

    @classmethod
    def zeros(cls, *shape: int, device: torch.device | None = None) -> "Counts":
        """Return counts of zero quantisations."""
        return cls(*(torch.zeros(*shape, len(names), dtype=torch.float64, device=device) for names in (SUMS, MAXIMA)))

    def add(self, other: "Counts") -> None:
        """Add other counts to these, in place."""
        self.sums.add_(other.sums)
        torch.maximum(self.maxima, other.maxima, out=self.maxima)

    def by_name(self) -> Mapping[str, Tensor]:
        """Return the numbers by name."""
        return dict(zip((*SUMS, *MAXIMA), (*self.sums.unbind(-1), *self.maxima.unbind(-1)), strict=True))


class QuantizationListener(InternalHook):
    """Collector of the counts of one module's quantisations, while it is active.

    Args:
        is_active: returns whether the listener is active; without active listeners, nothing is counted.
        counts: receives the counts by role; they add up until the owner of the mapping clears it.
    """

    def __init__(self, is_active: Callable[[], bool], counts: MutableMapping[str, Counts]) -> None:
        self.is_active = is_active
        self._counts = counts

    def record(self, role: str, counts: Counts) -> None:
        """Add the counts of one quantisation, on their device and without synchronisation."""
        if role not in self._counts:
            self._counts[role] = Counts(counts.sums.clone(), counts.maxima.clone())
        else:
            self._counts[role].add(counts)


def count(values: Tensor, rounded: Tensor, limits: Tensor, scales: Tensor, total: int) -> Counts:
    """Count the losses of one quantisation.

    Args:
        values: the original tensor.
        rounded: the dequantised tensor, of the same shape.
        limits: scale · largest number of the format, float64 (exact), broadcastable to ``values``; inf for a scale of
            0, since all losses are underflow there.
        scales: the scales, one per block.
        total: the number of elements, without the zeros that pad a block.

    Overflow: a finite magnitude exceeds its limit; the excess is magnitude / limit. Underflow: a non-zero number became
    0. ``upper_half_elements`` are magnitudes above half the limit, including overflow. Error and norm use the finite
    values only.
    """
    finite = values.isfinite()
    magnitude = torch.where(finite, values, 0.0).abs().double()
    over = magnitude > limits
    excess = torch.where(over, magnitude / limits, 0.0)
    error = torch.where(finite, rounded.double() - values.double(), 0.0)
    overflowing = over.sum()
    one = torch.ones((), dtype=torch.float64, device=values.device)
    sums = (
        one,
        overflowing > 0,
        one * total,
        overflowing,
        ((rounded == 0) & (magnitude > 0)).sum(),
        (~finite).sum(),
        (magnitude > limits / 2).sum(),
        excess.sum(),
        error.square().sum(),
        magnitude.square().sum(),
    )
    maxima = excess.new_zeros(len(MAXIMA))
    if excess.numel():
        # A scale of 0 has no inverse, so it counts as infinite in max(1 / scale).
        smallest = torch.where(scales > 0, scales.double(), torch.inf).min()
        maxima = torch.stack([excess.max(), scales.max().double(), 1 / smallest])
    return Counts(torch.stack([number.double() for number in sums]), maxima)
