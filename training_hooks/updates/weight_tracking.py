"""Norms of the weights, and the spectrum of each weight matrix: its ranks and its tail."""

from dataclasses import dataclass

import torch
from loopscope import HookPoint, HookRegistry, RunDataContext, TrainingHook
from loopscope.errors import require
from loopscope.hooks import Metrics
from loopscope.tensors import Vector, norm_of_each, total_of, trainable, unsharded
from torch import Tensor

from ..measures import effective_rank, singular_values, smaller_gram, stable_rank, stacked

BLOCK_ELEMENTS = 2**17  # distances that are computed at once, so that they stay in a processor's cache


@dataclass(frozen=True)
class PowerLawFit:
    """The fitted tail of each sample, float64 of shape (samples,); NaN for a sample without a fit."""

    exponent: Tensor  # α of the density p(x) ∝ x^−α; its standard error is (α − 1)/√count
    distance: Tensor  # the Kolmogorov-Smirnov distance between the tail and the fitted law
    count: Tensor  # the number of values in the tail


def fit_power_law(values: Tensor, min_tail: int) -> PowerLawFit:
    """Fit p(x) ∝ x^−α, x ≥ x_min, to the upper tail of every sample of non-negative values.

    Each value x_min of a sample that leaves at least ``min_tail`` values in the tail is a candidate. Its exponent is
    α = 1 + n/Σ ln(xᵢ/x_min) over the n values of the tail. The fit takes the x_min with the smallest distance
    D = sup |S(x) − P(x)|, S and P the distribution functions of tail and law (Clauset, Shalizi and Newman 2009, eq.
    3.1 and 3.9), and the smallest x_min of several. Values of at most n·ε times the largest one, n the size of the
    sample and ε of float64, are rounding errors of zero and never start a tail.

    Args:
        values: shape (samples, n), each sample in descending order.
        min_tail: the least number of values in a tail.

    >>> x = torch.arange(1, 1001, dtype=torch.float64) / 1001
    >>> round(fit_power_law(x[None] ** -0.5, 10).exponent.item(), 1)
    3.0
    """
    ascending = values.double().flip(-1)
    size = ascending.shape[-1]
    largest = ascending[:, -1:]
    logs = (ascending / largest).log()
    counts = torch.arange(size, 0, -1, dtype=logs.dtype, device=logs.device)
    excess = logs.flip(-1).cumsum(-1).flip(-1) / counts - logs  # mean of ln(x/x_min) over the tail: 1/(α − 1)
    starts = (ascending > largest * (size * torch.finfo(logs.dtype).eps)) & (excess > 0)
    # A tail has all values ≥ x_min, so only the first of equal values starts one.
    starts[:, 1:] &= ascending[:, 1:] > ascending[:, :-1]

    distances = _distances(logs, excess, counts, max(size - min_tail + 1, 0))
    candidates = distances.shape[-1]
    if not candidates:
        return PowerLawFit(*torch.full((3, len(values)), torch.nan, dtype=logs.dtype, device=logs.device))
    distances = distances.where(starts[:, :candidates], torch.inf)
    best = distances.min(dim=-1, keepdim=True)
    # α = 1 + 1/(mean of ln(x/x_min)), shape (samples, 1)
    best_fits = torch.stack([1 + 1 / excess, counts.expand_as(excess)]).take_along_dim(best.indices[None], dim=-1)
    exponent, distance, count = torch.cat([best_fits[:1], best.values[None], best_fits[1:]]).squeeze(-1)
    fitted = distance.isfinite()
    return PowerLawFit(*(part.where(fitted, torch.nan) for part in (exponent, distance, count)))


def _distances(logs: Tensor, excess: Tensor, counts: Tensor, candidates: int) -> Tensor:
    """Return D of the laws that start at the first ``candidates`` values, shape (samples, candidates).

    The distribution function of a sample jumps at its values, so the supremum is at one of them, on the left or the
    right side: D is half a jump more than the distance from the middle of the jump. Values before the start count as
    values on the law.

    Args:
        logs: ln(x/largest x), ascending, shape (samples, size).
        excess: the mean of ln(x/x_min) over the tail of each start, shape (samples, size).
        counts: the number of values in the tail of each start, shape (size,).
        candidates: the number of starts.
    """
    samples, size = logs.shape
    indices = torch.arange(size, device=logs.device)
    blocks = [logs[:, :0]]
    step = max(BLOCK_ELEMENTS // max(samples * size, 1), 1)
    for first in range(0, candidates, step):
        start = indices[first : min(first + step, candidates)]
        # S in the middle of the jump at x_j is (j − start + ½)/n, and 1 − P(x) = exp(−ln(x/x_min)/excess), so
        # P − S = −(1 − P) + 1 − S; shapes (starts, size) and (samples, starts, size)
        halfway = (indices - start[:, None] + 0.5) / counts[start, None]
        offset = halfway.masked_fill_(indices < start[:, None], 0) - 1
        survivors = (logs[:, start, None] - logs[:, None, :]).clamp_(max=0).div_(excess[:, start, None]).exp_()
        blocks.append(survivors.add_(offset).abs_().amax(dim=-1) + 0.5 / counts[start])
    return torch.cat(blocks, dim=-1)


def spectra_by_size(matrices: Vector) -> list[tuple[list[str], Tensor]]:
    """Return the singular values of matrices, decomposed together for equal numbers of singular values.

    Returns:
        For each number n = min(rows, columns) the names of the matrices, and their singular values as a float64 tensor
        of shape (names, n), descending; NaN for a matrix with an infinite or NaN element.
    """
    grams: dict[tuple[int, torch.device], dict[str, Tensor]] = {}
    for name, matrix in matrices.items():
        gram = smaller_gram(matrix)
        grams.setdefault((len(gram), gram.device), {})[name] = gram
    return [(list(group), singular_values(torch.stack(list(group.values())))) for group in grams.values()]


@HookRegistry.register
class WeightTracking(TrainingHook):
    """Measure the norms of the weights and the spectrum of each matrix: its ranks and the exponent of its tail.

    Reports norms after every epoch and everything at SNAPSHOT, since a spectrum costs about a millisecond for a matrix
    of width 128. W is a parameter of two or more dimensions as a matrix (out, everything else), σ are all its
    min(out, everything else) singular values in descending order, and λ = σ² the eigenvalues of WᵀW. Other parameters
    only have a norm.

    The tail is fitted by p(λ) ∝ λ^−α for λ ≥ λ_min: α by maximum likelihood, and as λ_min the eigenvalue with the least
    Kolmogorov-Smirnov distance between tail and law (Clauset, Shalizi and Newman 2009; for weights Martin and Mahoney
    2021). The standard error of α is (α − 1)/√n, n the number of values in the tail.

    Assumes that the first dimension of a matrix is the output (a transposed convolution, whose first dimension is the
    input, is unfolded as (in, out·k·k)). Several matrices in one parameter, as in a fused query-key-value projection,
    count as one. The fit assumes that the spectrum has a tail of this form, which the distance tests: small random
    matrices have no such tail, and their α is large and meaningless.

    Args:
        min_tail: the least number of eigenvalues in a tail; a matrix with fewer eigenvalues gets no fit.
    """

    name = "weight_tracking"
    hook_points = frozenset({HookPoint.POST_EPOCH, HookPoint.SNAPSHOT})
    metrics = """
        total_norm | ‖θ‖₂ over all trainable parameters | [0, ∞)
            | Weight decay reduces it; in grokking it peaks while the data are memorised and falls afterwards.
        norm/<parameter> | ‖W‖_F of one parameter | [0, ∞) | Shows which layers grow or decay.
        spectral_norm/<parameter> | ‖W‖₂ = σ₁ (SNAPSHOT) | [0, ∞)
            | The largest factor by which the matrix stretches a vector. NaN here and below: an element is not finite.
        effective_rank/<parameter> | exp(−Σ p ln p), p = σ/Σσ over all singular values (Roy and Vetterli 2007; SNAPSHOT)
            | [1, n], n = min(out, everything else) | The number of equally strong directions with this entropy. Falls
            as structure replaces noise. NaN: the matrix is zero.
        stable_rank/<parameter> | ‖W‖_F²/‖W‖₂² = Σσ²/σ₁² (SNAPSHOT) | [1, n]
            | The number of directions as strong as the strongest. Unlike the effective rank insensitive to small
            singular values.
        mean_spectral_norm | mean over the matrices of ‖W‖₂ (SNAPSHOT) | [0, ∞) | Shows whether the matrices grow.
        mean_effective_rank | mean over the matrices, NaNs left out, of effective_rank (SNAPSHOT) | [1, ∞)
            | Falls as the model as a whole becomes simpler.
        mean_stable_rank | mean over the matrices, NaNs left out, of stable_rank (SNAPSHOT) | [1, ∞)
            | Falls as a few directions come to dominate the model as a whole.
        alpha/<parameter> | α = 1 + n/Σ ln(λ/λ_min) over the n eigenvalues λ ≥ λ_min of WᵀW (SNAPSHOT) | (1, ∞)
            | 2 to 6: the heavy tail of well-trained layers. Below 2: few directions dominate, often by overfitting.
            Large: no heavy tail, as at initialisation. Standard error (α − 1)/√alpha_tail. Omitted for a matrix with
            fewer than min_tail eigenvalues, NaN if too few of them differ from zero and from each other.
        alpha_distance/<parameter> | min over λ_min of D = sup |S − P| over λ ≥ λ_min, S the distribution function of
            the tail, P(λ) = 1 − (λ/λ_min)^(1−α) (SNAPSHOT) | [0, 1]
            | The misfit of the power law. Above about 1/√alpha_tail: the tail does not follow a power law.
        alpha_tail/<parameter> | n, the eigenvalues λ ≥ λ_min (SNAPSHOT) | [min_tail, min(out, everything else)]
            | The part of the spectrum that the fit describes; near min_tail: little.
        mean_alpha | mean over the fitted matrices of α (SNAPSHOT) | (1, ∞)
            | Falls as training builds correlations into the weights.
        weighted_alpha | mean over the fitted matrices of α·log₁₀ λ₁ (Martin and Mahoney 2021; SNAPSHOT) | (−∞, ∞)
            | The exponent combined with the size of the weights. Among models of one architecture a smaller value goes
            with higher test accuracy.
    """

    def __init__(self, *, min_tail: int = 10) -> None:
        require(min_tail >= 2, f"weight_tracking.min_tail is {min_tail}; it must be at least 2.")
        self._min_tail = min_tail

    def compute(self, ctx: RunDataContext) -> Metrics:
        """Return the norms, and at SNAPSHOT the metrics of the spectra as well."""
        weights = trainable(ctx.model)
        norms = norm_of_each(weights) if weights else {}
        metrics = {f"norm/{name}": value for name, value in norms.items()}
        if norms:
            metrics["total_norm"] = total_of(stacked(norms.values()))
        if ctx.hook_point is HookPoint.SNAPSHOT:
            metrics |= self._spectral_metrics({name: value for name, value in weights.items() if value.ndim > 1})
        return metrics

    def _spectral_metrics(self, weights: Vector) -> dict[str, Tensor]:
        matrices = {name: unsharded(weight).flatten(start_dim=1) for name, weight in weights.items() if weight.numel()}
        largest, effective, stable = {}, {}, {}
        tails: dict[str, dict[str, Tensor]] = {"alpha": {}, "alpha_distance": {}, "alpha_tail": {}}
        for names, spectra in spectra_by_size(matrices):
            for name, values in zip(names, spectra.unbind(), strict=True):
                largest[name], effective[name], stable[name] = values[0], effective_rank(values), stable_rank(values)
            if spectra.shape[1] >= self._min_tail:
                fit = fit_power_law(spectra.square(), self._min_tail)
                for column, numbers in zip(tails.values(), (fit.exponent, fit.distance, fit.count), strict=True):
                    column.update(zip(names, numbers.unbind(), strict=True))
        columns = {"spectral_norm": largest, "effective_rank": effective, "stable_rank": stable, **tails}
        metrics = {f"{column}/{name}": value for column, values in columns.items() for name, value in values.items()}
        for averaged in ("spectral_norm", "effective_rank", "stable_rank", "alpha"):
            if columns[averaged]:
                metrics[f"mean_{averaged}"] = stacked(columns[averaged].values()).nanmean()
        if alphas := tails["alpha"]:
            log_largest = stacked(largest[name] for name in alphas).square().log10()  # log₁₀ λ₁
            metrics["weighted_alpha"] = (stacked(alphas.values()) * log_largest).nanmean()
        return metrics
