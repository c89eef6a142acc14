"""The Fourier spectrum of a token embedding: which frequencies a model of modular arithmetic computes with."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from framework.contexts import MetricInfo, RunDataContext, RunInfo
from framework.errors import UnsuitableError, UsageError, unknown
from framework.hook_points import HookPoint
from framework.hooks import TrainingHook
from framework.metrics import Metrics
from framework.param_vectors import whole
from framework.registry import HookRegistry


def one_sided_power(signal: Tensor) -> Tensor:
    """Return the power of a real signal at the frequencies 1..n//2, summed over columns; shape (n // 2,), float64.

    ``signal`` has shape (n, columns) and runs along its rows. A frequency and its conjugate are one, so its power is
    2|X_k|²/n (|X_k|²/n at n/2, which is its own conjugate), X the discrete Fourier transform. The mean is left out:
    the powers add up to the squared distance of the signal from its mean (Parseval).

    >>> wave = torch.cos(2 * torch.pi * 3 * torch.arange(8) / 8)
    >>> one_sided_power(wave[:, None]).round().tolist()
    [0.0, 0.0, 4.0, 0.0]
    """
    length = signal.shape[0]
    centred = signal.double() - signal[:1]  # equal rows then give exact zeros, not the rounding of their mean
    power: Tensor = torch.fft.rfft(centred, dim=0).abs().square().sum(dim=1)[1:] * (2 / length)
    if length % 2 == 0:
        power[-1] /= 2
    return power


def gini(values: Tensor) -> Tensor:
    """Return the Gini coefficient of n non-negative values: 0 if all are equal, 1 − 1/n if one has everything.

    Σᵢ (2i − n − 1)·xᵢ / (n·Σᵢ xᵢ) over the values in ascending order, i from 1; NaN if all are zero.

    >>> gini(torch.tensor([1.0, 0.0, 0.0, 0.0])).item()
    0.75
    """
    count = values.numel()
    ranks = torch.arange(1, count + 1, device=values.device, dtype=values.dtype)
    differences: Tensor = ((2 * ranks - count - 1) * values.sort().values).sum()
    return differences / (count * values.sum())


def spectral_entropy(fractions: Tensor) -> Tensor:
    """Return the entropy −Σ f ln f of fractions that add up to 1, in nats, with 0·ln 0 = 0."""
    terms: Tensor = torch.special.entr(fractions)
    return terms.sum()


@HookRegistry.register
class Fourier(TrainingHook):
    """Measure the one-sided Fourier spectrum of the token embedding along the vocabulary.

    Args:
        top_k: how many key frequencies to report.
        embedding: name of the embedding's parameter; empty: the weight of the model's first ``nn.Embedding``.
        period: use the embedding's first ``period`` rows, the numbers 0..period − 1; 0: all rows.
    """

    name = "fourier"
    hook_points = frozenset({HookPoint.POST_EPOCH})

    def __init__(self, *, top_k: int = 5, embedding: str = "", period: int = 0) -> None:
        if top_k < 1:
            raise UsageError(f"top_k is {top_k}; it must be at least 1.")
        if period < 0 or period == 1:
            raise UsageError(f"period is {period}; it must be 0 (all rows) or at least 2.")
        self._top_k = top_k
        self._embedding = embedding
        self._period = period

    def start(self, run: RunInfo) -> None:
        """Find the embedding; raises :class:`UnsuitableError` if there is none that fits the options."""
        name = self._embedding or first_embedding(run.model)
        parameters = dict(run.model.named_parameters())
        if name not in parameters:
            raise unknown("parameter", name, parameters)
        shape = tuple(parameters[name].shape)
        if len(shape) != 2:
            raise UnsuitableError(
                f"fourier.embedding is {name!r}, of shape {shape}; it must be a matrix (rows are tokens)."
            )
        length = self._period or shape[0]
        if not 2 <= length <= shape[0]:
            raise UnsuitableError(
                f"fourier.period is {self._period}, but {name!r} has {shape[0]} rows; at least 2 are needed."
            )
        if self._top_k > length // 2:
            raise UnsuitableError(
                f"fourier.top_k is {self._top_k}, but a signal of {length} rows has {length // 2} frequencies."
            )

    def compute(self, ctx: RunDataContext) -> Metrics:
        """Return the spectrum's key frequencies and how concentrated it is."""
        table = whole(ctx.model.get_parameter(self._embedding or first_embedding(ctx.model)))
        power = one_sided_power(table[: self._period or None])
        fractions = power / power.sum()
        top = fractions.topk(self._top_k)
        entropy = spectral_entropy(fractions)
        return {
            "total_power": power.sum(),
            "key_frequencies": list(top.indices + 1),
            "key_fractions": list(top.values),
            "top_k_fraction": top.values.sum(),
            "gini": gini(power),
            "entropy": entropy,
            "effective_frequencies": entropy.exp(),
        }

    def describe_metrics(self) -> Sequence[MetricInfo]:
        """Describe the spectrum; P_k is :func:`one_sided_power`, f_k = P_k / ΣP, F the number of frequencies."""
        return [
            MetricInfo(
                "total_power",
                "ΣP, P_k = 2|X_k|²/n summed over the embedding's dimensions (|X_k|²/n at k = n/2), k = 1..F, F = ⌊n/2⌋",
                "[0, ∞)",
                "Squared distance of the embedding's rows from their mean; 0: all tokens are embedded alike, and the "
                "other metrics are NaN.",
            ),
            MetricInfo(
                "key_frequencies",
                "the top_k frequencies k with the largest P_k, largest first",
                "1..F",
                "In cycles per n tokens; a model that has generalised keeps the same few of them.",
            ),
            MetricInfo(
                "key_fractions",
                "f_k = P_k / ΣP of the key frequencies",
                "[0, 1], descending",
                "The share of power at each key frequency.",
            ),
            MetricInfo(
                "top_k_fraction",
                "Σ f_k over the key frequencies",
                "[top_k/F, 1]",
                "Near top_k/F: no structure; near 1: the embedding consists of these waves (grokked).",
            ),
            MetricInfo(
                "gini",
                "Σᵢ (2i − F − 1)·P₍ᵢ₎ / (F·ΣP), P₍ᵢ₎ ascending",
                "[0, 1 − 1/F]",
                "0: power is spread evenly; near 1: a few frequencies have all of it. Rises as the model generalises.",
            ),
            MetricInfo(
                "entropy",
                "−Σ f_k ln f_k",
                "[0, ln F] nats",
                "Falls as power gathers in few frequencies.",
            ),
            MetricInfo(
                "effective_frequencies",
                "exp(entropy)",
                "[1, F]",
                "How many equally strong frequencies would have this entropy.",
            ),
        ]


def first_embedding(model: nn.Module) -> str:
    """Return the name of the first ``nn.Embedding``'s weight, or raise :class:`UnsuitableError`."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding):
            return f"{name}.weight" if name else "weight"
    kinds = ", ".join(f"{name} ({type(module).__name__})" for name, module in model.named_modules() if name)
    raise UnsuitableError(
        f"Hook 'fourier' needs a token embedding, and the model has no nn.Embedding. Its modules: "
        f"{kinds or type(model).__name__}. Name a parameter with --hook-config fourier.embedding=NAME."
    )
