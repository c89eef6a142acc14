"""Modular addition: power spectra, pairs of tokens, and losses with kept or removed frequencies of a + b."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn import functional

from ..measures import jackknife_variance

Sweep = Callable[[], Iterable[tuple[Tensor, Tensor]]]
"""Returns an iterable over batches of pairs, shape (n, 2), with their logits, shape (n, p); called once per pass."""


def power_of_columns(signal: Tensor) -> Tensor:
    """Return the power of each column of a real signal at the frequencies 1..n//2; shape (n // 2, columns), float64.

    ``signal`` has shape (n, columns); the rows are its points. With X the discrete Fourier transform, the power is
    2|X_k|²/n, because frequency k and its conjugate n − k count together, and |X_k|²/n at n/2, which is its own
    conjugate. Frequency 0 is excluded, so the powers add up to the squared distance of the signal from its mean
    (Parseval).
    """
    length = signal.shape[0]
    centred = (
        signal.double() - signal[:1]
    )  # exact zeros for equal rows; subtracting the mean would leave rounding errors
    waves = torch.fft.rfft(centred, dim=0)[1:]
    power: Tensor = (waves.real.square() + waves.imag.square()) * (2 / length)
    if length % 2 == 0:
        power[-1] /= 2
    return power


def one_sided_power(signal: Tensor) -> Tensor:
    """Return :func:`power_of_columns` summed over the columns; shape (n // 2,), float64.

    >>> wave = torch.cos(2 * torch.pi * 3 * torch.arange(8) / 8)
    >>> one_sided_power(wave[:, None]).round().tolist()
    [0.0, 0.0, 4.0, 0.0]
    """
    return power_of_columns(signal).sum(dim=1)


@runtime_checkable
class StridedData(Protocol):
    """A configuration of data over the residues 0..p − 1, with a strategy that sorts by a mod ``stride``."""

    p: int
    stride: int | None


def data_stride(config: Any, period: int) -> int:
    """Return the stride s of data over ``period`` residues, by default ⌊√p⌋; 0 if the configuration has no stride."""
    fits = isinstance(config, StridedData) and config.p == period
    return (config.stride or math.isqrt(period)) if fits else 0


def stride_harmonics(period: int, stride: int) -> list[int]:
    """Return the frequencies nearest to j·p/s, j = 1..⌊s/2⌋, for which a step of s is almost a whole number of turns.

    Data sorted by a mod s, then by a, visit a in steps of s. In one such step a wave of frequency k turns by k·s/p. If
    that is near a whole number, the wave keeps its phase for many batches, and its gradients add up.

    >>> stride_harmonics(97, 9)
    [11, 22, 32, 43]
    """
    return sorted({min(round(j * period / stride), period // 2) for j in range(1, stride // 2 + 1)})


def token_pairs(batch: Any) -> tuple[Tensor, Tensor] | None:
    """Return the pairs (n, 2) and the targets (n,) of a batch of two-token inputs, ``None`` for any other batch."""
    if not (isinstance(batch, (tuple, list)) and len(batch) == 2 and all(isinstance(part, Tensor) for part in batch)):
        return None
    pairs, targets = batch
    are_integers = not (pairs.is_floating_point() or targets.is_floating_point())
    fits = targets.ndim == 1 and pairs.shape == (len(targets), 2)
    return (pairs, targets) if are_integers and fits else None


def rows_of_pairs(first: Tensor, p: int) -> Tensor:
    """Return the pairs of every a in ``first`` with every b in 0..p − 1, shape (len(first)·p, 2)."""
    return torch.cartesian_prod(first, torch.arange(p, device=first.device)).view(-1, 2)


def waves(p: int, frequencies: Tensor) -> Tensor:
    """Return orthonormal columns that span cos(2πks/p) and sin(2πks/p) for every given k, shape (p, 2K), float64.

    The sine of k = p/2 is zero, and so is its column.
    """
    turns = torch.outer(torch.arange(p, device=frequencies.device), frequencies) % p
    angles = turns.double() * (2 * torch.pi / p)
    columns = torch.cat([angles.cos(), angles.sin()], dim=1)
    lengths = columns.norm(dim=0)
    return torch.where(lengths > 1e-6, columns / lengths, 0.0)


def ablated_losses(
    sweep: Sweep, p: int, frequencies: Tensor, training_pairs: Tensor, groups: Sequence[Tensor] = ()
) -> dict[str, Tensor]:
    """Return the mean cross-entropies of logits with frequencies of s = (a + b) mod p kept or removed.

    ``sweep`` covers complete rows: for each of its a, all b. The part of the logits at the frequencies is their
    projection onto :func:`waves`.

    * ``restricted_loss``: the loss of the mean logits plus this part, over all pairs of the sweep
    * ``excluded_loss``: the loss of the logits minus this part, over the pairs that are in ``training_pairs``, shape
      (n, 2); NaN if there are no such pairs (Nanda et al. 2023, arXiv 2301.05217, section 5.1)
    * ``full_loss``, ``full_train_loss``: the losses of the unchanged logits, over the same two sets of pairs

    Waves in a − b or in b alone are orthogonal to waves in s only over all p rows, and leak into the losses of R < p
    rows. If the a of the R rows are given in two or more disjoint ``groups``, and no batch of the sweep contains two
    groups, the result has estimates by the jackknife that leaves out one group at a time: for every loss an ``_error``,
    its standard error over the choice of rows, and for restricted and excluded loss a ``_bias``, the leakage. They are
    multiplied by √(1 − R/p) and 1 − R/p, since the rows are drawn without replacement.
    """
    # ``member`` (G, p): the a of each group. ``taking`` (V, p): the a of each variant, all rows or all but one group.
    marked = [torch.isin(torch.arange(p, device=a.device), a) for a in groups] or [torch.ones(p, dtype=torch.bool)]
    member = torch.stack(marked).to(frequencies.device)
    taking = torch.cat([member.any(dim=0)[None], member.any(dim=0) & ~member]) if len(groups) > 1 else member
    means, inner, basis = _projections(sweep, p, waves(p, frequencies), member, taking)
    # Rows of ``totals``: number of pairs, full loss, number of training pairs, their full loss, their excluded loss.
    training_keys, totals = _keys(training_pairs, p), torch.zeros(5, len(taking), dtype=torch.float64).to(inner.device)
    for pairs, logits in sweep():
        sums, trained = pairs.sum(dim=1) % p, torch.isin(_keys(pairs, p), training_keys)
        full = functional.cross_entropy(logits, sums, reduction="none")
        train_logits, rows = logits[trained], basis[sums[trained]]
        # logits − Π(logits) with Π(logits) = basis·(basisᵀ·logits), shape (training pairs, p), for each variant
        excluded = [
            functional.cross_entropy(train_logits - rows @ part, sums[trained], reduction="none") for part in inner
        ]
        taken, taken_trained = taking[:, pairs[:, 0]].double(), taking[:, pairs[trained, 0]].double()
        columns = torch.stack([torch.ones_like(full), full, trained, full * trained], dim=1).double()
        totals[:4] += (taken @ columns).T
        totals[4] += (taken_trained * torch.stack(excluded)).sum(dim=1)
    # The restricted logits depend on s only, and every s has equally many pairs in complete rows.
    classes = torch.arange(p, device=inner.device)
    restricted = [
        functional.cross_entropy(mean + basis @ part, classes) for mean, part in zip(means, inner, strict=True)
    ]
    losses = {
        "restricted_loss": torch.stack(restricted),
        "excluded_loss": totals[4] / totals[2],
        "full_loss": totals[1] / totals[0],
        "full_train_loss": totals[3] / totals[2],
    }
    return {name: values[0] for name, values in losses.items()} | _jackknife(losses, 1 - taking[0].double().mean())


def _jackknife(losses: Mapping[str, Tensor], unseen: Tensor) -> dict[str, Tensor]:
    """Return errors and biases from values of shape (1 + G,): of all rows, then without each group; empty if G < 2.

    ``unseen`` is 1 − R/p, the fraction of rows that were not drawn.
    """
    estimates: dict[str, Tensor] = {}
    for name, values in losses.items():
        left_out, count = values[1:], len(values) - 1
        if count > 1:
            estimates[f"{name}_error"] = (jackknife_variance(left_out) * unseen).sqrt()
        if count > 1 and not name.startswith("full"):
            # bias = (G − 1)(mean of x₋ᵢ − x)(1 − R/p)
            estimates[f"{name}_bias"] = (left_out.mean() - values[0]) * (count - 1) * unseen
    return estimates


def _projections(sweep: Sweep, p: int, basis: Tensor, member: Tensor, taking: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean logits (V, p) and coefficients (V, 2K, p) on ``basis`` for each variant, a row of ``taking`` (V, p).

    ``member`` (G, p) marks the a of each group. The third result is ``basis`` in the dtype of the logits.
    """
    sums, counts = torch.zeros(()), torch.zeros(())
    for pairs, logits in sweep():
        basis = basis.to(logits.dtype)
        rows = torch.cat([torch.ones_like(basis[:, :1]), basis], dim=1)[pairs.sum(dim=1) % p]
        # All pairs of a batch are in one group, so the group of its first a is that of the batch.
        in_group = member[:, pairs[:1, 0], None].to(logits.dtype)
        sums = in_group * (rows.T @ logits) + sums.to(logits.device)
        counts = in_group * len(pairs) + counts.to(logits.device)
    # Sums over the groups of each variant, shape (V, 1 + 2K, p), divided by their numbers of pairs.
    has_group = (taking.double() @ member.double().T > 0).to(sums.dtype)
    averages = torch.einsum("vg,gkp->vkp", has_group, sums) / torch.einsum("vg,gkp->vkp", has_group, counts)
    # basisᵀ·L̄ with L̄_s the mean logits at s is p times the mean over pairs, since every s has equally many pairs.
    return averages[:, 0], averages[:, 1:] * p, basis


def _keys(pairs: Tensor, p: int) -> Tensor:
    return pairs[:, 0] * p + pairs[:, 1]
