"""What a quantisation lost: overflow, underflow, error, and the spread of its scales, kept on the device."""

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
    """Numbers that add up over quantisations, layers and ranks, and numbers of which the largest counts.

    Args:
        sums: float64, one number for each of ``SUMS``, of any leading shape.
        maxima: float64, one for each of ``MAXIMA``; 0 where nothing was seen.
    """

    sums: Tensor
    maxima: Tensor

    @classmethod
    def zeros(cls, *shape: int, device: torch.device | None = None) -> "Counts":
        """Return counts of nothing."""
        return cls(*(torch.zeros(*shape, len(names), dtype=torch.float64, device=device) for names in (SUMS, MAXIMA)))

    def add(self, other: "Counts") -> None:
        """Add other counts to these, in place."""
        self.sums.add_(other.sums)
        torch.maximum(self.maxima, other.maxima, out=self.maxima)

    def by_name(self) -> Mapping[str, Tensor]:
        """Return the numbers by name."""
        return dict(zip((*SUMS, *MAXIMA), (*self.sums.unbind(-1), *self.maxima.unbind(-1)), strict=True))


class QuantizationListener(InternalHook):
    """Takes what the quantisers of one module count while it is heard.

    Args:
        is_heard: tells whether anything is counted now; a quantiser that nobody hears does not count.
        counts: where the counts go, by role; they add up until whoever owns it clears it.
    """

    def __init__(self, is_heard: Callable[[], bool], counts: MutableMapping[str, Counts]) -> None:
        self.is_heard = is_heard
        self._counts = counts

    def record(self, role: str, counts: Counts) -> None:
        """Add what one quantisation lost; on its device, which nobody waits for."""
        if role not in self._counts:
            self._counts[role] = Counts(counts.sums.clone(), counts.maxima.clone())
        else:
            self._counts[role].add(counts)


def count(values: Tensor, rounded: Tensor, limits: Tensor, scales: Tensor, total: int) -> Counts:
    """Count what one quantisation lost.

    Args:
        values: the tensor before.
        rounded: the tensor after, dequantised, of the same shape.
        limits: scale · largest number of the format, float64 (exact), broadcastable to ``values``; inf where the scale
            is 0, since what is lost there is lost to underflow.
        scales: the scales, one a block.
        total: elements; zeros that fill up a block are not among them.

    Overflow means that a finite magnitude exceeds its limit; the excess is magnitude / limit. Underflow means that a
    number other than 0 became 0. Values in the upper half, above half the limit, are counted under that name only.
    Error and norm are of the finite values.
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
        smallest = torch.where(scales > 0, scales.double(), torch.inf).min()
        maxima = torch.stack([excess.max(), scales.max().double(), 1 / smallest])
    return Counts(torch.stack([number.double() for number in sums]), maxima)
