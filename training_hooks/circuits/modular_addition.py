"""Modular addition: power by frequency, pairs of tokens, and losses with frequencies of a + b kept or removed."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn import functional

from ..measures import jackknife_variance

Sweep = Callable[[], Iterable[tuple[Tensor, Tensor]]]
"""Goes once through pairs of shape (n, 2) with their logits of shape (n, p)."""


def power_of_columns(signal: Tensor) -> Tensor:
    """Return the power of each column of a real signal at the frequencies 1..n//2; shape (n // 2, columns), float64.

    ``signal`` has shape (n, columns) and runs along its rows. A frequency and its conjugate are one, so its power is
    2|X_k|²/n (|X_k|²/n at n/2, which is its own conjugate), X the discrete Fourier transform. The mean is left out:
    the powers add up to the squared distance of the signal from its mean (Parseval).
    """
    length = signal.shape[0]
    centred = signal.double() - signal[:1]  # equal rows then give exact zeros, not the rounding of their mean
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
    """A configuration of data over the residues 0..p − 1 that one strategy sorts by a mod ``stride``."""

    p: int
    stride: int | None


def data_stride(config: Any, period: int) -> int:
    """Return the stride s of a configuration's data over ``period`` residues (⌊√p⌋ unless set), 0 if it has none."""
    fits = isinstance(config, StridedData) and config.p == period
    return (config.stride or math.isqrt(period)) if fits else 0


def stride_harmonics(period: int, stride: int) -> list[int]:
    """Return the frequencies nearest to j·p/s, j = 1..⌊s/2⌋: those of which a step by s is almost a whole turn.

    Data in the order of a mod s, then a, go through a in steps of s. Along that path a wave of frequency k turns by
    k·s/p, so those near a whole number of turns keep their phase for many batches: their gradients add up.

    >>> stride_harmonics(97, 9)
    [11, 22, 32, 43]
    """
    return sorted({min(round(j * period / stride), period // 2) for j in range(1, stride // 2 + 1)})


def token_pairs(batch: Any) -> tuple[Tensor, Tensor] | None:
    """Return the pairs (n, 2) and the targets (n,) of a batch of two-token inputs, ``None`` for any other batch."""
    if not (isinstance(batch, (tuple, list)) and len(batch) == 2 and all(isinstance(part, Tensor) for part in batch)):
        return None
    pairs, targets = batch
    whole_numbers = not (pairs.is_floating_point() or targets.is_floating_point())
    fits = targets.ndim == 1 and pairs.shape == (len(targets), 2)
    return (pairs, targets) if whole_numbers and fits else None


def rows_of_pairs(first: Tensor, p: int) -> Tensor:
    """Return the pairs of every a in ``first`` with every b in 0..p − 1, shape (len(first)·p, 2)."""
    return torch.cartesian_prod(first, torch.arange(p, device=first.device)).view(-1, 2)


def waves(p: int, frequencies: Tensor) -> Tensor:
    """Return orthonormal columns that span cos(2πks/p) and sin(2πks/p) for every given k, shape (p, 2K), float64.

    The sine of k = p/2 vanishes; its column is zero.
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

    ``sweep`` goes through whole rows: for each of its a, all b. The part of the logits at the frequencies is their
    projection onto :func:`waves`. ``restricted_loss`` is that of the mean logits plus this part, over all pairs;
    ``excluded_loss`` that of the logits minus this part, over those pairs of the sample that are among
    ``training_pairs`` (n, 2), NaN if none is (Nanda et al. 2023, arXiv 2301.05217, section 5.1). ``full_loss`` and
    ``full_train_loss`` are those of the logits as they are, over the same pairs.

    Waves in a − b or b alone are orthogonal to those in s over all p rows only; some rows let them leak. If the a of
    R rows are given in two or more disjoint ``groups``, of which no two share a piece of the sweep, every loss gets an
    ``_error``, its standard error over the choice of rows, and restricted and excluded loss a ``_bias``, what leaks
    into them: those of the jackknife that leaves out a group at a time, times √(1 − R/p) and 1 − R/p, since the rows
    are drawn without replacement.
    """
    marked = [torch.isin(torch.arange(p, device=a.device), a) for a in groups] or [torch.ones(p, dtype=torch.bool)]
    member = torch.stack(marked).to(frequencies.device)
    taking = torch.cat([member.any(dim=0)[None], member.any(dim=0) & ~member]) if len(groups) > 1 else member
    means, inner, basis = _projections(sweep, p, waves(p, frequencies), member, taking)
    training_keys, totals = _keys(training_pairs, p), torch.zeros(5, len(taking), dtype=torch.float64).to(inner.device)
    for pairs, logits in sweep():
        sums, trained = pairs.sum(dim=1) % p, torch.isin(_keys(pairs, p), training_keys)
        full = functional.cross_entropy(logits, sums, reduction="none")
        known, rows = logits[trained], basis[sums[trained]]
        without = [functional.cross_entropy(known - rows @ part, sums[trained], reduction="none") for part in inner]
        taken, taken_known = taking[:, pairs[:, 0]].double(), taking[:, pairs[trained, 0]].double()
        columns = torch.stack([torch.ones_like(full), full, trained, full * trained], dim=1).double()
        totals[:4] += (taken @ columns).T
        totals[4] += (taken_known * torch.stack(without)).sum(dim=1)
    every = torch.arange(p, device=inner.device)
    restricted = [functional.cross_entropy(mean + basis @ part, every) for mean, part in zip(means, inner, strict=True)]
    losses = {
        "restricted_loss": torch.stack(restricted),
        "excluded_loss": totals[4] / totals[2],
        "full_loss": totals[1] / totals[0],
        "full_train_loss": totals[3] / totals[2],
    }
    return {name: values[0] for name, values in losses.items()} | _jackknifed(losses, 1 - taking[0].double().mean())


def _jackknifed(losses: Mapping[str, Tensor], unseen: Tensor) -> dict[str, Tensor]:
    """Return errors and biases of values (1 + G,): of everything, then without each group; none for fewer than two."""
    found: dict[str, Tensor] = {}
    for name, values in losses.items():
        left, count = values[1:], len(values) - 1
        if count > 1:
            found[f"{name}_error"] = (jackknife_variance(left) * unseen).sqrt()
        if count > 1 and not name.startswith("full"):
            found[f"{name}_bias"] = (left.mean() - values[0]) * (count - 1) * unseen
    return found


def _projections(sweep: Sweep, p: int, basis: Tensor, member: Tensor, taking: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean logits (V, p) and coefficients (V, 2K, p) on ``basis``, over the a that each row of ``taking`` takes.

    ``member`` (G, p) tells which a is in which group; the third is ``basis`` in the type of the logits.
    """
    sums, counts = torch.zeros(()), torch.zeros(())
    for pairs, logits in sweep():
        basis = basis.to(logits.dtype)
        rows = torch.cat([torch.ones_like(basis[:, :1]), basis], dim=1)[pairs.sum(dim=1) % p]
        mine = member[:, pairs[:1, 0], None].to(logits.dtype)
        sums = mine * (rows.T @ logits) + sums.to(logits.device)
        counts = mine * len(pairs) + counts.to(logits.device)
    whole_groups = (taking.double() @ member.double().T > 0).to(sums.dtype)
    found = torch.einsum("vg,gkp->vkp", whole_groups, sums) / torch.einsum("vg,gkp->vkp", whole_groups, counts)
    return found[:, 0], found[:, 1:] * p, basis


def _keys(pairs: Tensor, p: int) -> Tensor:
    return pairs[:, 0] * p + pairs[:, 1]
