"""Random Hadamard transform of both operands of a product: it spreads outliers and preserves the product."""

import math
from functools import lru_cache

import torch
from torch import Tensor

from .casts import computable, zero_padded

SIGNS_SEED = 0  # seed of the sign vector, which is the same for all layers and steps


@lru_cache
def random_hadamard_matrix(size: int) -> Tensor:
    """Return D·H/√size, (size, size) in float64 on the CPU: D random signs on a diagonal, H the Hadamard matrix.

    H is Sylvester's, so ``size`` is a power of two. The matrix is orthogonal.
    """
    # Sylvester's recursion: H₁ = [1], H₂ₙ = [[Hₙ, Hₙ], [Hₙ, −Hₙ]].
    hadamard = torch.ones(1, 1, dtype=torch.float64, device="cpu")
    while len(hadamard) < size:
        hadamard = torch.cat([torch.cat([hadamard, hadamard], 1), torch.cat([hadamard, -hadamard], 1)])
    draws = torch.rand(size, generator=torch.Generator().manual_seed(SIGNS_SEED), dtype=torch.float64, device="cpu")
    return torch.where(draws < 0.5, -1.0, 1.0)[:, None] * hadamard / math.sqrt(size)


def hadamard_transform(matrix: Tensor, size: int) -> Tensor:
    """Multiply each ``size`` values of a row by D·H/√size, in the matrix's dtype; rows are padded with zeros.

    D·H/√size is orthogonal, so A·Bᵀ does not change if both matrices are transformed. NVIDIA's recipe for NVFP4
    transforms both operands of the weight's gradient with size 16 (arXiv 2509.25149).

    Args:
        matrix: (rows, columns); computed in float32, or in float64 for a float64 matrix.
        size: a power of two; 0 returns the matrix unchanged.
    """
    if not size:
        return matrix
    wide = computable(matrix)
    padded = zero_padded(wide, -wide.shape[1] % size)
    # (blocks, size) @ (size, size), the blocks of all rows in one product.
    blocks = padded.reshape(-1, size) @ random_hadamard_matrix(size).to(wide)
    transformed: Tensor = blocks.reshape(padded.shape).to(matrix.dtype)
    return transformed
