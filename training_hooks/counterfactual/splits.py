"""Batched split of epochs into content and ordering, with errors, from inner products."""

from itertools import combinations
from typing import NamedTuple

import torch
from loopscope.student_t import critical_t
from torch import Tensor

from ..measures import jackknife_variance

CONFIDENCE = 0.95
FEWEST = 3
"""Smallest number of shuffles for an error: it needs splits with one shuffle fewer, and a split needs two."""


class Splits(NamedTuple):
    """Estimates of many splits, each of shape (splits,)."""

    ordering_fraction: Tensor
    null_fraction: Tensor
    excess: Tensor


def splits(gram: Tensor, observed: Tensor, shuffles: Tensor) -> Splits:
    """Compute :func:`.counterfactual.ordering_split` for s epochs at once.

    ``gram`` has shape (n, n); ``observed``, shape (s,), and ``shuffles``, shape (s, K), are indices into it.
    """
    # With S = Σ_j c_j: ‖S − c_k‖² = ‖S‖² − 2 c_k·S + ‖c_k‖² and g·(S − c_k) = g·S − g·c_k, shapes (s, K).
    # Each term is 1 − max(0, cos)², as in energy_outside; factors of 1/K cancel in the cosine.
    among = gram[shuffles[:, :, None], shuffles[:, None, :]]
    across, energy = gram[observed[:, None], shuffles], gram[observed, observed]
    total, rows, squares = among.sum((1, 2)), among.sum(2), among.diagonal(dim1=1, dim2=2)
    sums_of_others = total[:, None] - 2 * rows + squares
    across_others = (across.sum(1, keepdim=True) - across).clamp(min=0)
    matched = (1 - across_others.square() / (energy[:, None] * sums_of_others)).clamp(min=0)  # rounding may be below
    null = (1 - (rows - squares).clamp(min=0).square() / (squares * sums_of_others)).clamp(min=0)
    fraction = (1 - across.sum(1).clamp(min=0).square() / (energy * total)).clamp(min=0)
    return Splits(fraction, null.mean(1), matched.mean(1) - null.mean(1))


def squared_errors(gram: Tensor, shuffles: Tensor) -> Splits:
    """Return squared standard errors of the splits of epoch 0 with K ≥ 3 shuffles each, ``shuffles`` of shape (s, K).

    The errors of the fractions are by the jackknife over shuffles, (K−1)/K Σᵢ (x₋ᵢ − mean x₋)², x₋ᵢ without shuffle i,
    for a fixed observed epoch. The error of the excess is the larger of its jackknife and of the placebos: with pᵢ the
    excess of shuffle i instead of the observed epoch against the K − 1 others, (1 − 1/K²) mean pᵢ². If the fractions of
    single epochs scatter about a common value with variance σ², the variance of an excess is σ²(1 + 1/K) with K
    shuffles, and that of a placebo σ²(1 + 1/(K−1)); the factor is their quotient.

    Placebos vary too little if the shuffles hardly agree; the jackknife does not have this fault. Placebos are also
    invalid for an epoch whose order has an effect. Therefore, if the excess is outside the 95 % interval around zero,
    the error is at least the jackknife plus :func:`observed_variance`.
    """
    sets, count = shuffles.shape
    first = torch.zeros(sets, dtype=torch.long, device=gram.device)
    left_out, placebos = [], []
    for i in range(count):
        others = torch.cat([shuffles[:, :i], shuffles[:, i + 1 :]], dim=1)
        left_out.append(splits(gram, first, others))
        placebos.append(splits(gram, shuffles[:, i], others).excess)
    # (K−1)/K·Σᵢ(x₋ᵢ − mean x₋)² and (1 − 1/K²)·mean pᵢ², shapes (s,)
    jackknife = [jackknife_variance(torch.stack(values)) for values in zip(*left_out, strict=True)]
    placebo = torch.stack(placebos).square().mean(dim=0) * (1 - 1 / count**2)
    chance = torch.maximum(jackknife[2], placebo)
    is_significant = splits(gram, first, shuffles).excess.square() > critical_t(count - 1, CONFIDENCE) ** 2 * chance
    effect = torch.maximum(chance, jackknife[2] + observed_variance(gram, shuffles))
    return Splits(jackknife[0], jackknife[1], torch.where(is_significant, effect, chance))


def observed_variance(gram: Tensor, shuffles: Tensor) -> Tensor:
    """Return the variance of the excess of epoch 0 due to the chance in that epoch, by the delta method; shape (s,).

    Two shuffles cᵢ and cⱼ differ only by chance, so (cᵢ − cⱼ)/√2 is a sample of the chance in one epoch. Let m be the
    mean of the other shuffles, which is independent of this sample. To first order the sample changes 1 − cos²(g, m) by
    −√2·(g·m)·(cᵢ − cⱼ)·(m − (g·m/‖g‖²) g) / (‖g‖²‖m‖²). The variance is the mean square over all pairs i, j.
    ``shuffles`` has shape (s, K), as in :func:`squared_errors`.
    """
    count, squares = shuffles.shape[1], []
    for i, j in combinations(range(count), 2):
        others = shuffles[:, [k for k in range(count) if k not in (i, j)]]
        change = gram[shuffles[:, i]] - gram[shuffles[:, j]]
        # g·m, ‖g‖²‖m‖², and (cᵢ − cⱼ)·(m − (g·m/‖g‖²) g), shapes (s,)
        along = gram[0, others].mean(1).clamp(min=0)
        energies = gram[0, 0] * gram[others[:, :, None], others[:, None, :]].mean((1, 2))
        slope = change.gather(1, others).mean(1) - along / gram[0, 0] * change[:, 0]
        squares.append(2 * (along / energies * slope).square())
    return torch.stack(squares).mean(dim=0)
