"""The circuits of attention heads, low-rank products of their projections, decomposed without forming them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from .attention_layers import HeadWeights


def product_spectrum(left: Tensor, right: Tensor) -> Tensor:
    """Return the singular values of LᵀR for each head, the min(r, m, n) that are not zero by its shape, descending.

    With LᵀR = Q_L (R_L R_Rᵀ) Q_Rᵀ from the QR decompositions of Lᵀ and Rᵀ, they are those of a small matrix.

    Args:
        left: L, shape (heads, r, m).
        right: R, shape (heads, r, n).

    Returns:
        float64, shape (heads, min(r, m, n)); NaN for a head with an element which is not finite.
    """
    finite = left.isfinite().all(dim=(1, 2)) & right.isfinite().all(dim=(1, 2))
    factors = [
        torch.linalg.qr(matrix.double().where(finite[:, None, None], 0).mT, mode="r").R for matrix in (left, right)
    ]
    values: Tensor = torch.linalg.svdvals(factors[0] @ factors[1].mT)
    return values.where(finite[:, None], torch.nan)


def copying_score(output: Tensor, value: Tensor) -> Tensor:
    """Return Σλ/Σ|λ| over the eigenvalues λ of W_O W_V for each head: 1 if all are real and positive, −1 if negative.

    The eigenvalues that are not zero are those of the small W_V W_O, whose trace is Σλ (Elhage et al. 2021).

    Args:
        output: W_O, shape (heads, width, value_dim).
        value: W_V, shape (heads, value_dim, width).

    Returns:
        float64, shape (heads,), in [−1, 1]; NaN where all eigenvalues are zero or an element is not finite.
    """
    small = value.double() @ output.double()
    finite = small.isfinite().all(dim=(1, 2))
    eigenvalues = torch.linalg.eigvals(small.where(finite[:, None, None], 0))
    score: Tensor = eigenvalues.real.sum(dim=-1) / eigenvalues.abs().sum(dim=-1)
    return score.where(finite, torch.nan)


@dataclass(frozen=True)
class CircuitSpectrum:
    """What the singular values σ of a circuit say, for each head; shape (heads,)."""

    norm: Tensor
    """√Σσ², the Frobenius norm."""
    effective_rank: Tensor
    """exp(−Σ p ln p), p = σ/Σσ."""
    leading_share: Tensor
    """σ₁²/Σσ²."""

    @classmethod
    def of(cls, values: Tensor) -> "CircuitSpectrum":
        """Sum up singular values of shape (heads, n), descending."""
        squares = values.square()
        shares = values / values.sum(dim=-1, keepdim=True)
        return cls(
            squares.sum(dim=-1).sqrt(),
            torch.special.entr(shares).sum(dim=-1).exp(),
            squares[:, 0] / squares.sum(dim=-1),
        )


def query_key_spectrum(weights: HeadWeights) -> Tensor:
    """Return the singular values of W_Qᵀ W_K for each head, which scores a pair of residuals."""
    return product_spectrum(weights.query, weights.key)


def output_value_spectrum(weights: HeadWeights) -> Tensor:
    """Return the singular values of W_O W_V for each head, which moves what is attended to."""
    return product_spectrum(weights.output.mT, weights.value)
