"""Measures of the terms of a policy in a loss: divergences, ratios, entropies, advantages and values."""

import math
from collections.abc import Sequence

import torch
from loopscope.doctor.senses import LogProbs, PolicyTerms, Regressed, Weighted, sampled_rows
from torch import Tensor

Measures = dict[str, Tensor | float]
MOST_RATIOS = 2**20
"""Ratios of which quantiles are computed."""
OUTER_TOLERANCE = 1e-4


def measures_of(terms: PolicyTerms) -> Measures:
    """Return the measures of one backward pass; empty for a loss without a policy."""
    if not terms.is_policy:
        return {}
    mask = _mask_for(terms)
    found = _entropies(terms.log_probs, mask)
    if terms.ratios is not None:
        found |= ratio_measures(_masked(terms.ratios, mask), terms.clip)
    if terms.to_reference is not None:
        estimate, error = k3(_masked(terms.to_reference, mask))
        found |= {"kl": estimate, "kl_error": error, "kl_k1": -_logarithms(terms.to_reference, mask).mean()}
    found |= _advantage_measures(terms.weighted, mask)
    if terms.is_critic_in_policy:
        found["critic_in_policy_loss"] = 1.0
    if terms.entropy_sign:
        found["entropy_sign"] = terms.entropy_sign
    if len(terms.divergence_signs) == 1:
        (found["divergence_sign"],) = map(float, terms.divergence_signs)
    if terms.preferences is not None:
        found |= preference_measures(terms.preferences)
    if terms.regressed and not any(one.has_picked for one in terms.regressed):
        found["explained_variance"] = explained_variance(terms.regressed[0])
    return found


def ratio_measures(ratios: Tensor, clip: tuple[float, float] | None) -> Measures:
    """Return measures of ratios r = π(a)/π_old(a), of shape (n,).

    >>> found = ratio_measures(torch.tensor([1.0, 2.0]), (0.8, 1.2))
    >>> [round(float(found[name]), 4) for name in ("approx_kl", "clip_fraction", "effective_sample_share")]
    [0.1534, 0.5, 0.9]
    """
    values = ratios.double()
    estimate, error = k3(ratios)
    ordered = values[:MOST_RATIOS].sort().values
    low, high = (ordered[round(share * (len(ordered) - 1))] for share in (0.001, 0.999))
    found: Measures = {
        "approx_kl": estimate,
        "approx_kl_error": error,
        "approx_kl_k1": -values.log().mean(),
        "ratio_mean": values.mean(),
        "ratio_max": values.max(),
        "ratio_low": low,
        "ratio_high": high,
        # (Σr)² / n·Σr², Kong (1992)
        "effective_sample_share": values.sum().square() / (len(values) * values.square().sum()),
    }
    if clip is not None:
        found["clip_fraction"] = ((values < clip[0]) | (values > clip[1])).double().mean()
    return found


def k3(ratios: Tensor) -> tuple[Tensor, Tensor]:
    """Return the estimate of a divergence, the mean of r − 1 − ln r ≥ 0, and its standard error.

    Samples are of the distribution in the denominator of r (Schulman, Approximating KL Divergence, 2020).
    """
    values = ratios.double()
    terms = values - 1 - values.log()
    spread = terms.std() if len(terms) > 1 else terms.new_zeros(())
    return terms.mean(), spread / math.sqrt(max(1, len(terms)))


def entropy_of(rows: Tensor) -> Tensor:
    """Return −Σ_a p_a ln p_a of log-probabilities, shape (rows, actions): shape (rows,).

    >>> [round(number, 4) for number in entropy_of(torch.tensor([[0.5, 0.5], [1.0, 0.0]]).log()).tolist()]
    [0.6931, 0.0]
    """
    normalised = rows.double().log_softmax(-1)
    chances = normalised.exp()
    return (chances * -normalised.nan_to_num(neginf=0.0)).sum(-1).abs()  # without the sign of −0


def explained_variance(values: Regressed) -> Tensor:
    """Return 1 − Var(targets − values) / Var(targets)."""
    targets, predicted = values.targets.double(), values.values.double()
    return 1 - (targets - predicted).var(correction=0) / targets.var(correction=0)


def preference_measures(logits: Tensor) -> Measures:
    """Return measures of the differences of implicit rewards, β·(chosen − rejected)."""
    values = logits.double()
    return {
        "preference_margin": values.mean(),
        "preference_accuracy": (values > 0).double().mean(),
        "preference_zero_fraction": (values == 0).double().mean(),
    }


def outer_difference(weights: Weighted) -> bool:
    """Return whether the advantages of N actions are a matrix a_i − b_j of all pairs, as (N,) − (N, 1) gives.

    >>> rewards, values = torch.tensor([1.0, 5.0, 2.0]), torch.tensor([0.0, 1.0, 4.0])
    >>> outer_difference(Weighted(rewards - values[:, None], -1, 3, (3,)))
    True
    >>> outer_difference(Weighted(rewards - values, -1, 3, (3,)))
    False
    """
    matrix, count = weights.advantages, weights.number
    if count < 3 or tuple(matrix.shape) != (count, count) or weights.shape not in ((count,), (count, 1), (1, count)):
        return False
    values = matrix[:64, :64].double()
    rest = values - values[:1] - values[:, :1] + values[0, 0]
    return bool(rest.abs().max() <= OUTER_TOLERANCE * values.abs().max())


def _advantage_measures(weights: Sequence[Weighted], mask: Tensor | None) -> Measures:
    if not weights:
        return {}
    if len({(one.advantages.data_ptr(), one.advantages.numel()) for one in weights}) == 1:
        values = weights[0].advantages
    else:  # one number for each action of an episode
        values = torch.cat([one.advantages.reshape(-1) for one in weights])
    advantages = values.double().reshape(-1)
    found: Measures = {
        "advantage_mean": advantages.mean(),
        "advantage_std": advantages.std(correction=0),
        "advantage_zero_fraction": (advantages == 0).double().mean(),
    }
    if any(map(outer_difference, weights)):
        found["advantages_of_pairs"] = 1.0
    if mask is not None and mask.ndim == 2 and values.numel() == len(mask) > 3:
        lengths = mask.double().sum(1)
        if float(lengths.std()) > 0 and float(advantages.std()) > 0:
            found["length_correlation"] = torch.corrcoef(torch.stack([advantages, lengths]))[0, 1]
    return found


def _mask_for(terms: PolicyTerms) -> Tensor | None:
    """Return the mask with the shape of the ratios, or of the log-probabilities, if there is one."""
    shapes = [tuple(terms.ratios.shape)] if terms.ratios is not None else [one.shape for one in terms.weighted]
    fitting = [mask for mask in terms.masks if tuple(mask.shape) in shapes and bool(mask.any())]
    return fitting[0].bool() if fitting else None


def _masked(values: Tensor, mask: Tensor | None) -> Tensor:
    return values[mask] if mask is not None and mask.shape == values.shape else values.reshape(-1)


def _logarithms(values: Tensor, mask: Tensor | None) -> Tensor:
    return _masked(values, mask).double().log()


def _entropies(log_probs: Sequence[LogProbs], mask: Tensor | None) -> Measures:
    """Return the mean entropy, and those of the first and of the last quarter of the positions of completions."""
    rows = [one.rows for one in log_probs if one.rows is not None]
    if rows:
        if mask is not None and len(rows) == 1 and rows[0].shape[:-1] == mask.shape:
            return _by_position(rows[0], mask)
        return {
            "entropy": torch.cat([entropy_of(sampled_rows(item.reshape(-1, item.shape[-1]))) for item in rows]).mean()
        }
    scales = [one.scale for one in log_probs if one.scale is not None]
    if scales:  # ½ ln 2πe + ln σ for each dimension
        entropy = 0.5 * math.log(2 * math.pi * math.e) + scales[0].double().log()
        return {"entropy": entropy.sum(-1).mean() if entropy.ndim else entropy}
    return {}


def _by_position(rows: Tensor, mask: Tensor) -> Measures:
    """Return entropies of rows, shape (completions, positions, actions), at the positions of a mask."""
    counted, place = mask.sum(1, keepdim=True), mask.cumsum(1)
    parts = {
        "entropy": mask,
        "entropy_early": mask & (4 * place <= counted + 3),
        "entropy_late": mask & (4 * place > 3 * counted),
    }
    flat = rows.reshape(-1, rows.shape[-1])
    return {
        name: entropy_of(sampled_rows(flat, part.reshape(-1).nonzero().reshape(-1))).mean()
        for name, part in parts.items()
    }
