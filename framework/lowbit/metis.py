"""Metis (arXiv 2509.00404): casts of gradients as low-rank part plus residual, and weights split in the same way."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from ..errors import UsageError, require, unknown
from .casts import computable, refuse_fractions, refuse_other_types

Gains = Literal["none", "long_tail"]
GAINS: tuple[Gains, ...] = get_args(Gains)
LEADING = 5  # number of components that ``long_tail`` does not change
MIDDLE_GAIN, RESIDUAL_GAIN = 1.5, 2.0
"""Gains of ``long_tail`` on the rest of the low-rank part and on the residual."""
EXPONENTS = (-126, 100)
"""Limits for the exponent of the power of two that divides a float32 matrix with orthonormal columns.

The largest entry of a column is between 1/sqrt(rows) and 1, so its quotient is a normal float32 number.
"""


@dataclass(frozen=True)
class MetisOptions:
    """Decomposition of matrices before their casts, and the schedule for splitting weights.

    Args:
        rank: the number of components of the low-rank part, or a fraction in (0, 1) of the matrix's smaller side.
        gains: factors on the components: ``none``, or ``long_tail`` (1 for the leading five, 1.5 for the rest of the
            low-rank part, 2 for the residual). They apply to decomposed gradients; a split weight keeps its function.
        niter: power iterations of the randomised SVD; each makes it more accurate and costs two products.
        compensated: subtract the quantised low-rank part from a gradient to obtain its residual, so that the residual
            compensates for the rounding of the factors; the published method subtracts the exact part.
        forward: split weights into trained factors and a residual.
        backward: decompose the gradient of a layer's output before its cast.
        forward_warmup_steps: steps before weights are split; 0: they are split from the first step.
        merge_steps: steps after which the factors are merged and split again; 0: never.
    """

    rank: int | float = 60
    gains: Gains = "none"
    niter: int = 0
    compensated: bool = False
    forward: bool = True
    backward: bool = True
    forward_warmup_steps: int = 100
    merge_steps: int = 1000

    def __post_init__(self) -> None:
        whole = isinstance(self.rank, int) and not isinstance(self.rank, bool)
        if not (self.rank >= 1 if whole else isinstance(self.rank, float) and 0 < self.rank < 1):
            raise UsageError(
                f"The rank of Metis is {self.rank!r}; it must be a whole number of at least 1, or a fraction between "
                "0 and 1 of the matrix's smaller side."
            )
        if self.gains not in GAINS:
            raise unknown("gains", self.gains, GAINS)
        for name in ("compensated", "forward", "backward"):
            if not isinstance(vars(self)[name], bool):
                raise UsageError(f"{name} of Metis is {vars(self)[name]!r}; it must be True or False.")
        for name in ("niter", "forward_warmup_steps", "merge_steps"):
            refuse_fractions("Metis", **{name: vars(self)[name]})
            require(vars(self)[name] >= 0, f"{name} of Metis is {vars(self)[name]}; it must be at least 0.")

    def rank_of(self, shape: Sequence[int]) -> int:
        """Return the number of components for a matrix of this shape: from 1 to its smaller side."""
        smaller = min(shape)
        wanted = round(self.rank * smaller) if self.rank < 1 else int(self.rank)
        return min(max(1, wanted), smaller)


class Decomposition(NamedTuple):
    """M ≈ U·diag(s)·V, U of shape (rows, rank), s (rank,) descending, V (rank, columns)."""

    u: Tensor
    s: Tensor
    v: Tensor

    def product(self) -> Tensor:
        """Return U·diag(s)·V."""
        return (self.u * self.s) @ self.v


def randomised_svd(matrix: Tensor, rank: int, niter: int, generator: torch.Generator) -> Decomposition:
    """Return the leading part of a singular value decomposition (Halko et al., arXiv 0909.4061, without oversampling).

    With an orthonormal basis B of the range of M·Ω, Ω Gaussian, the small matrix BᵀM is decomposed exactly. At full
    rank the result is exact. The largest entry of each row of V is positive.

    Args:
        matrix: (rows, columns); bfloat16 and float16 are computed in float32. A matrix with infinite or NaN values is
            treated as zeros, so that the solver does not fail; the caller marks the result.
        rank: the number of components, at most the smaller side.
        niter: the number of power iterations.
        generator: draws Ω on the generator's device, so that all devices use the same draws.
    """
    wide = computable(refuse_other_types(matrix))
    largest = _largest(wide)
    return _leading_part(torch.where(largest.isfinite(), wide, 0.0), largest, rank, niter, generator)


def _leading_part(matrix: Tensor, largest: Tensor, rank: int, niter: int, generator: torch.Generator) -> Decomposition:
    """Decompose a finite matrix; ``largest`` is its largest magnitude.

    Every product divides its thin factor by a power of two near that magnitude, so that no product overflows.
    """
    draws = torch.randn(matrix.shape[1], rank, generator=generator, device=generator.device, dtype=torch.float32)
    # Division by a power of two is exact. This one is above the largest magnitude, except at the ends of the range.
    exponent = torch.where(largest.isfinite(), largest, 1.0).frexp().exponent
    scale = torch.ldexp(torch.ones_like(largest), exponent.clamp(*EXPONENTS))
    # Range finder: B = orth(M·Ω), then orth(M·orth(MᵀB)) for each power iteration; B has shape (rows, rank).
    basis = torch.linalg.qr(matrix @ (draws.to(matrix) / scale))[0]
    for _ in range(niter):
        basis = torch.linalg.qr(matrix.mT @ (basis / scale))[0]
        basis = torch.linalg.qr(matrix @ (basis / scale))[0]
    # MᵀB = Q·R and Rᵀ = L·diag(s)·P give M ≈ B·BᵀM = (B·L)·diag(s)·(P·Qᵀ).
    rows, triangle = torch.linalg.qr(matrix.mT @ (basis / scale))
    left, s, right = torch.linalg.svd(triangle.mT, full_matrices=False)
    u, v = basis @ left, right @ rows.mT
    largest_in_rows = v.gather(1, v.abs().argmax(1, keepdim=True))[:, 0]
    signs = torch.where(largest_in_rows < 0, -1.0, 1.0).to(v.dtype)
    return Decomposition(u * signs, s * scale, v * signs[:, None])


def low_rank_cast(
    matrix: Tensor, cast: Callable[[Tensor], Tensor], options: MetisOptions, generator: torch.Generator
) -> Tensor:
    """Return L + h·q(M − U·diag(s)·V), L = q(U)·diag(g·s)·q(V), the matrix M with quantised parts, in its dtype.

    The gains g and h are applied after the residual is computed, so that they have their nominal values. The published
    code scales s first, which turns ``long_tail`` (its ``ysche``) into 1, 0.5 and 2. ``compensated`` returns
    L + q(T − L), T = U·diag(g·s)·V + h·(M − U·diag(s)·V). U is quantised transposed, as in the published code, so that
    all values of a block belong to one component. If the matrix contains an infinity or NaN, the whole result is NaN.

    Args:
        matrix: (rows, columns); both may be 0.
        cast: quantises and dequantises U transposed, V and the residual, called once for each in this order: a
            :class:`.Cast`, or a function that also counts the losses.
        options: rank, gains, power iterations and ``compensated``.
        generator: the generator for the randomised SVD.
    """
    refuse_other_types(matrix)
    if not matrix.numel():
        return cast(matrix)
    wide = computable(matrix)
    largest = _largest(wide)
    finite = torch.where(largest.isfinite(), wide, 0.0)
    parts = _leading_part(finite, largest, options.rank_of(matrix.shape), options.niter, generator)
    gains, residual_gain = torch.ones_like(parts.s), 1.0
    if options.gains == "long_tail":
        gains[LEADING:] = MIDDLE_GAIN
        residual_gain = RESIDUAL_GAIN
    amplified = parts._replace(s=gains * parts.s)
    u, v = cast(parts.u.mT.contiguous()).mT, cast(parts.v)
    low_rank = Decomposition(u, amplified.s, v).product()
    residual = finite - parts.product()
    if options.compensated:
        correction = cast(residual_gain * residual + amplified.product() - low_rank)  # q(T − L)
    else:
        correction = residual_gain * cast(residual)  # h·q(M − U·diag(s)·V)
    return torch.where(largest.isfinite(), low_rank + correction, math.nan).to(matrix.dtype)


def _largest(matrix: Tensor) -> Tensor:
    """Return the largest magnitude, zero-dimensional; infinite or NaN if the matrix contains such a value."""
    low, high = torch.aminmax(matrix)
    return torch.maximum(-low, high)


class LowRankFactors(nn.Module):
    """U (rows × rank), s (rank) and V (rank × columns) of a split weight; frozen zeros until the layer is split.

    They are parameters from the start, so that optimizers, checkpoints and isolation checks always include them. Plain
    state dicts omit them, and contain the merged weight.
    """

    def __init__(self, weight: Tensor, rank: int) -> None:
        super().__init__()
        rows, columns = weight.shape
        self.u = nn.Parameter(weight.new_zeros(rows, rank), requires_grad=False)
        self.s = nn.Parameter(weight.new_zeros(rank), requires_grad=False)
        self.v = nn.Parameter(weight.new_zeros(rank, columns), requires_grad=False)

    @property
    def decomposition(self) -> Decomposition:
        """The factors, without copying them."""
        return Decomposition(self.u, self.s, self.v)

    @torch.no_grad()
    def clear(self) -> None:
        """Reset the factors to frozen zeros."""
        for parameter in self.parameters():
            parameter.zero_()
            parameter.requires_grad_(False)
            parameter.grad = None

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Save nothing: the layer saves its merged weight."""

    def _load_from_state_dict(self, *arguments: Any) -> None:
        """Load nothing: the layer loads its merged weight."""


class SplitLinear(nn.Linear):
    """A linear layer that may have factors in addition to its weight: split, y = U(s·(V·x)) + weight·x + bias.

    It is split if and only if its factors are trained (``requires_grad``), which is part of the training state and
    of durable checkpoints. Its ``state_dict`` is that of a plain linear layer with the merged weight. Loading a weight
    ends the split.
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

    # Private names, but torch's documentation of _save_to_state_dict allows subclasses to override it.
    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.is_split:
            destination[prefix + "weight"] = self.merged_weight()

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *arguments: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *arguments)
        if self.factors is not None and prefix + "weight" in state_dict:
            self.factors.clear()


def layers_with_factors(model: nn.Module) -> list[str]:
    """Return the names of layers that have factors: the meaning of their ``weight`` changes when they are split."""
    return [name for name, module in model.named_modules() if isinstance(module, SplitLinear) and module.factors]


def split_weight(weight: Tensor, rank: int, niter: int, generator: torch.Generator) -> tuple[Decomposition, Tensor]:
    """Return factors and residual of a weight, in its dtype; merged, they equal the weight up to rounding.

    The residual is the difference between the weight and the product of the rounded factors.
    """
    parts = randomised_svd(weight, rank, niter, generator)
    factors = Decomposition(*(part.to(weight.dtype) for part in parts))
    wide = torch.promote_types(weight.dtype, torch.float32)
    # Residual = W − U·diag(s)·V, of shape (rows, columns), with the factors in the dtype in which they are stored.
    product = Decomposition(*(part.to(wide) for part in factors)).product()
    return factors, (weight.to(wide) - product).to(weight.dtype)
