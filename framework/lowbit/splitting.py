"""Linear layers whose weight can be split into trained low-rank factors and a residual, and merged again."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .metis import Decomposition, randomised_svd


class LowRankFactors(nn.Module):
    """U (rows × rank), s (rank) and V (rank × columns) of a split weight; frozen zeros until the layer is split.

    They are parameters from the start, so that optimizers, checkpoints and guardians know them throughout. Plain state
    dicts leave them out: there the layer is its merged weight.
    """

    def __init__(self, weight: Tensor, rank: int) -> None:
        super().__init__()
        rows, columns = weight.shape
        self.u = nn.Parameter(weight.new_zeros(rows, rank), requires_grad=False)
        self.s = nn.Parameter(weight.new_zeros(rank), requires_grad=False)
        self.v = nn.Parameter(weight.new_zeros(rank, columns), requires_grad=False)

    @property
    def decomposition(self) -> Decomposition:
        """The factors, live."""
        return Decomposition(self.u, self.s, self.v)

    @torch.no_grad()
    def clear(self) -> None:
        """Return to frozen zeros."""
        for parameter in self.parameters():
            parameter.zero_()
            parameter.requires_grad_(False)
            parameter.grad = None

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Save nothing: the layer saves its merged weight."""

    def _load_from_state_dict(self, *arguments: Any) -> None:
        """Load nothing: the layer does."""


class SplitLinear(nn.Linear):
    """A linear layer that may have factors beside its weight: split, it is y = U(s·(V·x)) + weight·x + bias.

    It is split if and only if its factors are trained (``requires_grad``), which is part of the training state and
    of durable checkpoints. Its ``state_dict`` is that of a plain linear layer with the merged weight, and loading a
    weight makes it one that is not split.
    """

    factors: LowRankFactors | None

    @property
    def is_split(self) -> bool:
        """Whether the factors are in use."""
        return self.factors is not None and self.factors.s.requires_grad

    @torch.no_grad()
    def merged_weight(self) -> Tensor:
        """Return U·diag(s)·V + weight, computed in float32 or wider; the weight itself if it is not split."""
        if self.factors is None or not self.is_split:
            return self.weight.detach()
        wide = torch.promote_types(self.weight.dtype, torch.float32)
        parts = Decomposition(*(factor.detach().to(wide) for factor in self.factors.decomposition))
        return (parts.product() + self.weight.to(wide)).to(self.weight.dtype)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.is_split:
            destination[prefix + "weight"] = self.merged_weight()

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *arguments: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *arguments)
        if self.factors is not None and prefix + "weight" in state_dict:
            self.factors.clear()


def layers_with_factors(model: nn.Module) -> list[str]:
    """Name the layers that are split or may be: their ``weight`` is not the same quantity throughout a run."""
    return [name for name, module in model.named_modules() if isinstance(module, SplitLinear) and module.factors]


def split_weight(weight: Tensor, rank: int, niter: int, generator: torch.Generator) -> tuple[Decomposition, Tensor]:
    """Return factors and residual of a weight, in its own type, whose merged weight is the weight within rounding.

    The residual is what the factors leave after they were rounded to that type.
    """
    found = randomised_svd(weight, rank, niter, generator)
    factors = Decomposition(*(part.to(weight.dtype) for part in found))
    wide = torch.promote_types(weight.dtype, torch.float32)
    product = Decomposition(*(part.to(wide) for part in factors)).product()
    return factors, (weight.to(wide) - product).to(weight.dtype)
