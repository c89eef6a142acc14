"""A random Hadamard transform of both operands of a product: it spreads outliers and leaves the product what it is."""

import math
from functools import lru_cache

import torch
from torch import Tensor

from .casts import computable, zero_padded

SIGNS_SEED = 0  # of the one vector of signs, the same for all layers and steps


@lru_cache
def random_hadamard_matrix(size: int) -> Tensor:
    """Return D·H/√size, (size, size) in float64 on the CPU: D random signs on a diagonal, H the Hadamard matrix.

    H is Sylvester's, so ``size`` is a power of two. The matrix is orthogonal.
    """
    found = torch.ones(1, 1, dtype=torch.float64, device="cpu")
    while len(found) < size:
        found = torch.cat([torch.cat([found, found], 1), torch.cat([found, -found], 1)])
    draws = torch.rand(size, generator=torch.Generator().manual_seed(SIGNS_SEED), dtype=torch.float64, device="cpu")
    return torch.where(draws < 0.5, -1.0, 1.0)[:, None] * found / math.sqrt(size)


def transformed(matrix: Tensor, size: int) -> Tensor:
    """Return each ``size`` values of a row times D·H/√size, in the matrix's own type; rows are filled up with zeros.

    A product that sums over rows of two matrices, A·Bᵀ, is that of the transformed ones: D·H/√size is orthogonal.
    NVIDIA's recipe for NVFP4 does this with size 16 to both operands of the weight's gradient (arXiv 2509.25149).

    Args:
        matrix: (rows, columns); computed in float32, or float64 if it is.
        size: a power of two; 0: the matrix as it is.
    """
    if not size:
        return matrix
    wide = computable(matrix)
    padded = zero_padded(wide, -wide.shape[1] % size)
    turned = padded.reshape(-1, size) @ random_hadamard_matrix(size).to(wide)
    found: Tensor = turned.reshape(padded.shape).to(matrix.dtype)
    return found
