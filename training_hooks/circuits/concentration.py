"""How unevenly a total is shared out among many: the Gini coefficient, and the entropy of the shares."""

import torch
from torch import Tensor


def gini(values: Tensor) -> Tensor:
    """Return the Gini coefficient of n non-negative values: 0 if all are equal, 1 − 1/n if one has everything.

    Σᵢ (2i − n − 1)·xᵢ / (n·Σᵢ xᵢ) over the values in ascending order, i from 1; NaN if all are zero.

    >>> gini(torch.tensor([1.0, 0.0, 0.0, 0.0])).item()
    0.75
    """
    count = values.numel()
    ranks = torch.arange(1, count + 1, device=values.device, dtype=values.dtype)
    differences: Tensor = ((2 * ranks - count - 1) * values.sort().values).sum()
    return differences / (count * values.sum())


def entropy_of_shares(fractions: Tensor) -> Tensor:
    """Return the entropy −Σ f ln f of fractions that add up to 1, in nats, with 0·ln 0 = 0."""
    terms: Tensor = torch.special.entr(fractions)
    return terms.sum()
