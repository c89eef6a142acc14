"""Evenly spread indices without a period, for samples of the elements of a tensor."""

import torch
from torch import Tensor

GOLDEN_RATIO = (5**0.5 - 1) / 2


def spread_indices(count: int, size: int) -> Tensor:
    """Return ``min(count, size)`` ascending, distinct indices below ``count``, the same on every machine and rank.

    The range is divided into equal intervals with one index each. Multiples of the golden ratio give its place in the
    interval, so that the indices have no period in common with the rows of a matrix.
    """
    size = min(count, size)
    numbers = torch.arange(size + 1)
    # index_i = border_i + ⌊frac(i·φ)·(border_{i+1} − border_i)⌋ with border_i = ⌊i·count/size⌋
    borders = numbers * count // size
    offsets = (numbers * GOLDEN_RATIO).frac()[:-1] * borders.diff()
    return borders[:-1] + offsets.long()
