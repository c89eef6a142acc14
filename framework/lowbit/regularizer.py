"""Penalty that keeps weights away from both ends of a narrow format's range: large values and zero."""

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from ..errors import UsageError, nearest
from ..tensors import stacks_of_experts

OFFSET = 1e-6
"""Added to a weight before its inverse square is computed; the penalty has its pole at −1e-6."""


@dataclass(frozen=True, kw_only=True)
class RangePenalty:
    """λ·mean(α₁·w² + α₂·(w + 1e-6)⁻²), one mean over all elements of all matrices (Metis, arXiv 2509.00404).

    The published code sums the means of the matrices instead. There the effect of λ grows with the number of matrices,
    and an element of a small matrix has more weight than one of a large matrix.

    Args:
        weight: λ; 0 disables the penalty and its computation.
        large: α₁, the coefficient against large weights.
        small: α₂, the coefficient against small weights. The inverse square of a weight of 0.001 is a million, so λ has
            to be small.
    """

    weight: float = 0.0
    large: float = 1.0
    small: float = 1.0

    def __post_init__(self) -> None:
        for name, value in (("weight", self.weight), ("large", self.large), ("small", self.small)):
            if not 0 <= value < float("inf"):
                raise UsageError(f"The {name} of the range penalty is {value}; it must be a number of at least 0.")

    def __call__(self, matrices: Mapping[str, Tensor]) -> Tensor:
        """Return the penalty, zero-dimensional float32 (float64 with a float64 matrix), differentiable."""
        values = list(matrices.values())
        if not (self.weight and values):
            return torch.zeros((), device=values[0].device if values else None)
        # λ·Σ(α₁·w² + α₂·(w + 1e-6)⁻²) / number of elements, with each matrix in float32 or wider
        sums = []
        for matrix in values:
            wide = matrix.to(torch.promote_types(matrix.dtype, torch.float32))
            sums.append(self.large * wide.square().sum() + self.small * (wide + OFFSET).reciprocal().square().sum())
        return self.weight * torch.stack(sums).sum() / sum(matrix.numel() for matrix in values)


def penalised_matrices(model: nn.Module, pattern: str = "*") -> dict[str, nn.Parameter]:
    """Return the trained matrices with a matching name, and the stacks of matrices of experts, by name.

    After a Metis split, they include the factors U and V as well as the residual. Raises :class:`UsageError` if the
    pattern matches no matrix of the model.
    """
    stacks = stacks_of_experts(model)
    matrices = {
        name: parameter for name, parameter in model.named_parameters() if parameter.ndim == 2 or name in stacks
    }
    chosen = {name: parameter for name, parameter in matrices.items() if fnmatchcase(name, pattern)}
    if not chosen:
        raise UsageError(
            f"The range penalty applies to matrices whose name matches {pattern!r}, but no name matches."
            f"{nearest(pattern, matrices)}"
        )
    return {name: parameter for name, parameter in chosen.items() if parameter.requires_grad}
