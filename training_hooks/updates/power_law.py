"""A power law fitted to the tail of a sample by maximum likelihood and by the Kolmogorov-Smirnov distance."""

from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK_ELEMENTS = 2**17
"""Distances that are computed at once: few enough to stay in a processor's cache."""


@dataclass(frozen=True)
class PowerLawFit:
    """What describes the tail of each sample, float64; NaN where no tail can be fitted."""

    exponent: Tensor
    """α of the density p(x) ∝ x^−α; its standard error is (α − 1)/√count."""
    distance: Tensor
    """The Kolmogorov-Smirnov distance between the tail and the fitted law."""
    count: Tensor
    """How many values the tail has."""


def fit_power_law(values: Tensor, min_tail: int) -> PowerLawFit:
    """Fit p(x) ∝ x^−α, x ≥ x_min, to the upper tail of every sample of non-negative values.

    For each x_min among the values of a sample that leaves at least ``min_tail`` values in the tail, the exponent is
    α = 1 + n/Σ ln(xᵢ/x_min) over the n values of the tail; the x_min is taken whose law lies nearest to its tail in
    D = sup |S(x) − P(x)|, S and P the distribution functions of tail and law (Clauset, Shalizi and Newman 2009, eq.
    3.1 and 3.9); the smallest one if several do. Values below n·ε of the largest one, ε that of float64, are zeros of
    rounding and never start a tail.

    Args:
        values: shape (samples, n), each sample in descending order.
        min_tail: the least number of values in a tail.

    Returns:
        tensors of shape (samples,).

    >>> x = torch.arange(1, 1001, dtype=torch.float64) / 1001
    >>> round(fit_power_law(x[None] ** -0.5, 10).exponent.item(), 1)
    3.0
    """
    ascending = values.double().flip(-1)
    size = ascending.shape[-1]
    largest = ascending[:, -1:]
    logs = (ascending / largest).log()
    counts = torch.arange(size, 0, -1, dtype=logs.dtype, device=logs.device)
    excess = logs.flip(-1).cumsum(-1).flip(-1) / counts - logs
    starts = (ascending > largest * (size * torch.finfo(logs.dtype).eps)) & (excess > 0)
    starts[:, 1:] &= ascending[:, 1:] > ascending[:, :-1]

    distances = _distances(logs, excess, counts, max(size - min_tail + 1, 0))
    candidates = distances.shape[-1]
    if not candidates:
        return PowerLawFit(*torch.full((3, len(values)), torch.nan, dtype=logs.dtype, device=logs.device))
    distances = distances.where(starts[:, :candidates], torch.inf)
    best = distances.min(dim=-1, keepdim=True)
    chosen = torch.stack([1 + 1 / excess, counts.expand_as(excess)]).take_along_dim(best.indices[None], dim=-1)
    exponent, distance, count = torch.cat([chosen[:1], best.values[None], chosen[1:]]).squeeze(-1)
    fitted = distance.isfinite()
    return PowerLawFit(*(part.where(fitted, torch.nan) for part in (exponent, distance, count)))


def _distances(logs: Tensor, excess: Tensor, counts: Tensor, candidates: int) -> Tensor:
    """Return D of each law that starts at one of the first ``candidates`` values, shape (samples, candidates).

    ``excess`` is the mean of ln(x/x_min) over the tail of each start. The distribution function of a sample jumps at
    its values, so the supremum is reached at one of them, from the left or from the right: it is half a jump more than
    the distance from the middle of the jump. Values before the start lie on the law by definition.
    """
    samples, size = logs.shape
    places = torch.arange(size, device=logs.device)
    blocks = [logs[:, :0]]
    step = max(BLOCK_ELEMENTS // max(samples * size, 1), 1)
    for first in range(0, candidates, step):
        start = places[first : min(first + step, candidates)]
        halfway = (places - start[:, None] + 0.5) / counts[start, None]
        offset = halfway.masked_fill_(places < start[:, None], 0) - 1
        survivors = (logs[:, start, None] - logs[:, None, :]).clamp_(max=0).div_(excess[:, start, None]).exp_()
        blocks.append(survivors.add_(offset).abs_().amax(dim=-1) + 0.5 / counts[start])
    return torch.cat(blocks, dim=-1)
