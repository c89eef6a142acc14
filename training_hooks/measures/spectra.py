"""Singular values, and measures of how evenly a spectrum or another total is distributed."""

import torch
from torch import Tensor

PART = 2**20
"""Elements of a matrix that are in float64 at a time."""
BLOCKS, SMALLEST_BLOCK = 4, 128
"""Number of blocks of rows in which a symmetric product is computed up to its diagonal, and their smallest size.

Four blocks save a quarter of the time of matrices of width 512; a product of smaller blocks is slower than a whole one.
"""


def smaller_gram(matrix: Tensor) -> Tensor:
    """Return the lower triangle of the smaller one of WWᵀ and WᵀW, in float64; of a complex W with the conjugate.

    Its shape is (n, n), n = min(rows, columns); elements above the diagonal have arbitrary values.
    """
    # Both products have the same nonzero eigenvalues σ², so the smaller one suffices. With W = (W₁ W₂ …) it is
    # Σ WᵢWᵢᵀ, so that a few columns at a time are in float64.
    wide_matrix = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    count = len(wide_matrix)
    dtype = torch.promote_types(matrix.dtype, torch.float64)
    gram = torch.zeros(count, count, dtype=dtype, device=matrix.device)
    block = max(SMALLEST_BLOCK, -(-count // BLOCKS))
    for part in torch.split(wide_matrix, max(1, PART // max(1, count)), dim=1):
        wide_part = part.to(dtype)
        for first in range(0, count, block):
            last = min(first + block, count)
            gram[first:last, :last].addmm_(wide_part[first:last], wide_part[:last].mH)
    return gram


def singular_values(grams: Tensor) -> Tensor:
    """Return all n singular values of matrices from their :func:`smaller_gram`, largest first, shape (matrices, n).

    They are the square roots of its eigenvalues: several times faster than a singular value decomposition, and exact to
    about 1e-8 of the largest one; float32 weights are exact to 1e-7. All are NaN for a matrix with an infinity or NaN.

    >>> singular_values(smaller_gram(torch.diag(torch.tensor([3.0, 4.0])))[None]).tolist()
    [[4.0, 3.0]]
    """
    # eigvalsh raises an error for a matrix with a NaN, so decompose zeros instead and replace the result.
    finite = grams.isfinite().flatten(start_dim=1).all(dim=1)
    # σᵢ = √λᵢ(WWᵀ); rounding can make a zero eigenvalue slightly negative.
    squares: Tensor = torch.linalg.eigvalsh(grams.where(finite[:, None, None], 0), UPLO="L").flip(-1)
    return squares.clamp(min=0).sqrt().where(finite[:, None], torch.nan)


def effective_rank(values: Tensor) -> Tensor:
    """Return exp(−Σ p ln p), p = σ/Σσ over all singular values σ (Roy and Vetterli 2007); NaN if all are zero.

    Here and below ``values`` may have leading dimensions; the last dimension is the spectrum.

    >>> effective_rank(torch.ones(4)).item()
    4.0
    """
    return entropy_of_shares(values / values.sum(-1, keepdim=True)).exp()


def stable_rank(values: Tensor) -> Tensor:
    """Return ‖W‖_F²/‖W‖₂² = Σσ²/max σ² from singular values σ; NaN if all are zero.

    >>> stable_rank(torch.tensor([2.0, 2.0, 0.0])).item()
    2.0
    """
    squares = values.square()
    return squares.sum(-1) / squares.amax(-1)


def leading_share(values: Tensor, count: int = 1) -> Tensor:
    """Return the fraction of the energy Σσ² in the ``count`` largest singular values; NaN if all are zero.

    >>> leading_share(torch.tensor([3.0, 1.0])).item()
    0.8999999761581421
    """
    squares = values.square()
    return squares.topk(min(count, squares.shape[-1])).values.sum(-1) / squares.sum(-1)


def participation_ratio(eigenvalues: Tensor) -> Tensor:
    """Return (Σλ)²/Σλ² of non-negative eigenvalues λ, the effective number of equal ones; NaN if all are zero.

    >>> participation_ratio(torch.tensor([1.0, 1.0, 0.0])).item()
    2.0
    """
    return eigenvalues.sum(-1).square() / eigenvalues.square().sum(-1)


def gini(values: Tensor) -> Tensor:
    """Return the Gini coefficient of n non-negative values: 0 if all are equal, 1 − 1/n if only one is not zero.

    Σᵢ (2i − n − 1)·xᵢ / (n·Σᵢ xᵢ) over the values in ascending order, i from 1; NaN if all are zero.

    >>> gini(torch.tensor([1.0, 0.0, 0.0, 0.0])).item()
    0.75
    """
    count = values.numel()
    ranks = torch.arange(1, count + 1, device=values.device, dtype=values.dtype)
    return torch.div(((2 * ranks - count - 1) * values.sort().values).sum(), count * values.sum())


def entropy_of_shares(fractions: Tensor) -> Tensor:
    """Return the entropy −Σ f ln f of fractions that add up to 1, in nats, with 0·ln 0 = 0."""
    return torch.sum(torch.special.entr(fractions), dim=-1)
