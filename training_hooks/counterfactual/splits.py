"""Batched split of epochs into content and ordering, with errors, from inner products."""

from itertools import combinations
from typing import NamedTuple

import torch
from loopscope.training import critical_t
from torch import Tensor

from ..measures import jackknife_variance

CONFIDENCE = 0.95
FEWEST = 3
"""Shuffles that an error needs: it is made of splits with one shuffle fewer, and a split needs two."""


class Splits(NamedTuple):
    """Estimates of many splits, each of shape (splits,)."""

    ordering_fraction: Tensor
    null_fraction: Tensor
    excess: Tensor


def splits(gram: Tensor, observed: Tensor, shuffles: Tensor) -> Splits:
    """Split many epochs at once, as :func:`.counterfactual.ordering_split` does one.

    ``gram`` has shape (n, n); ``observed``, of shape (s,), and ``shuffles``, of shape (s, K), are indices into it.
    """
    among = gram[shuffles[:, :, None], shuffles[:, None, :]]
    across, energy = gram[observed[:, None], shuffles], gram[observed, observed]
    total, rows, own = among.sum((1, 2)), among.sum(2), among.diagonal(dim1=1, dim2=2)
    sums_of_others = total[:, None] - 2 * rows + own
    of_others = (across.sum(1, keepdim=True) - across).clamp(min=0)
    matched = 1 - of_others.square() / (energy[:, None] * sums_of_others)
    null = 1 - (rows - own).clamp(min=0).square() / (own * sums_of_others)
    fraction = 1 - across.sum(1).clamp(min=0).square() / (energy * total)
    return Splits(fraction, null.mean(1), matched.mean(1) - null.mean(1))


def squared_errors(gram: Tensor, shuffles: Tensor) -> Splits:
    """Return squared standard errors of the splits of epoch 0 with K ≥ 3 shuffles each, ``shuffles`` of shape (s, K).

    Those of the fractions are the jackknife's over shuffles, (K−1)/K Σᵢ (x₋ᵢ − mean x₋)², x₋ᵢ without shuffle i, for
    the observed epoch as it is. That of the excess is the larger of its jackknife and of what placebos say, the excess
    pᵢ of shuffle i in the place of the observed epoch against the K − 1 others: (1 − 1/K²) mean pᵢ². Where fractions of
    single epochs scatter about a common value, the variance of an excess is σ²(1 + 1/K) with K shuffles, that of a
    placebo σ²(1 + 1/(K−1)); the factor is their quotient. Placebos are too equal where shuffles hardly agree, which the
    jackknife is not; and they say nothing of an epoch whose order has an effect. Where the excess is beyond the 95 %
    interval about zero, the jackknife therefore gets :func:`observed_variance` added.
    """
    sets, count = shuffles.shape
    first = torch.zeros(sets, dtype=torch.long, device=gram.device)
    without, placebos = [], []
    for i in range(count):
        others = torch.cat([shuffles[:, :i], shuffles[:, i + 1 :]], dim=1)
        without.append(splits(gram, first, others))
        placebos.append(splits(gram, shuffles[:, i], others).excess)
    jackknife = [jackknife_variance(torch.stack(values)) for values in zip(*without, strict=True)]
    placebo = torch.stack(placebos).square().mean(dim=0) * (1 - 1 / count**2)
    chance = torch.maximum(jackknife[2], placebo)
    beyond = splits(gram, first, shuffles).excess.square() > critical_t(count - 1, CONFIDENCE) ** 2 * chance
    effect = torch.maximum(chance, jackknife[2] + observed_variance(gram, shuffles))
    return Splits(jackknife[0], jackknife[1], torch.where(beyond, effect, chance))


def observed_variance(gram: Tensor, shuffles: Tensor) -> Tensor:
    """Return the variance that the excess of epoch 0 has by the chance in that epoch, by the delta method; shape (s,).

    Two shuffles cᵢ and cⱼ differ by chance alone, so that (cᵢ − cⱼ)/√2 is what chance adds to an epoch. To first order
    it changes 1 − cos²(g, m), m the mean of the other shuffles, which share no chance with it, by
    −√2·(g·m)·(cᵢ − cⱼ)·(m − (g·m/‖g‖²) g) / (‖g‖²‖m‖²); the variance is the mean square over the pairs.
    ``shuffles`` as in :func:`squared_errors`.
    """
    count, found = shuffles.shape[1], []
    for i, j in combinations(range(count), 2):
        others = shuffles[:, [k for k in range(count) if k not in (i, j)]]
        change = gram[shuffles[:, i]] - gram[shuffles[:, j]]
        along = gram[0, others].mean(1).clamp(min=0)
        energies = gram[0, 0] * gram[others[:, :, None], others[:, None, :]].mean((1, 2))
        slope = change.gather(1, others).mean(1) - along / gram[0, 0] * change[:, 0]
        found.append(2 * (along / energies * slope).square())
    return torch.stack(found).mean(dim=0)
