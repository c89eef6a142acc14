"""Fourier spectra of embedding, decoder and neurons: the frequencies that a model of modular arithmetic uses."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from loopscope import HookPoint, HookRegistry, Remembered, RunDataContext, TrainingHook
from loopscope.data import preserved_loader
from loopscope.errors import UnsuitableError, listed, require
from loopscope.hooks import ENDLESS, Metrics, RunInfo
from loopscope.option_words import hook_option_text, option_text
from loopscope.tensors import unsharded
from loopscope.training import Ranks
from torch import Tensor, nn

from ..measures import entropy_of_shares, gini, notice, splitmix64
from .embeddings import feed_forward_inputs, find_matrix, first_embedding, output_projection
from .modular_addition import (
    ablated_losses,
    data_stride,
    one_sided_power,
    power_of_columns,
    rows_of_pairs,
    stride_harmonics,
    token_pairs,
)

NEURON_ROWS = 4  # values of a for the spectra of neurons, each paired with all p values of b
ALL_PAIRS = 20_000
"""Default largest number of pairs for the losses; for more, a sample of this size, but at least 16 rows."""
GROUPS = 16  # largest number of jackknife groups
ROWS_SEED = 2301_05217
LOGITS_AT_ONCE = 2**24  # largest number of logits in memory
PAIRS_AT_ONCE = 4096  # largest number of pairs per forward pass


def spectrum(power: Tensor, top_k: int, prefix: str = "") -> dict[str, Any]:
    """Return the ``top_k`` strongest frequencies of a one-sided spectrum (all if it has fewer) and their shares."""
    fractions = power / power.sum()
    top = fractions.topk(min(top_k, len(power)))
    return {
        f"{prefix}key_frequencies": list(top.indices + 1),
        f"{prefix}key_fractions": list(top.values),
        f"{prefix}top_k_fraction": top.values.sum().clamp(max=1),  # which rounding may exceed
        f"{prefix}gini": gini(power),
    }


def acquisition(since: Tensor, is_key: Tensor, epoch: int) -> Tensor:
    """Return the epoch in which the current unbroken series of each key frequency started, NaN for other frequencies.

    ``since`` is the result of the previous call, ``is_key`` marks the key frequencies in ``epoch``; both have shape
    (F,).
    """
    return torch.where(is_key, since.nan_to_num(nan=float(epoch)), torch.nan)


def sampled_rows(p: int, count: int) -> Tensor:
    """Draw ``count`` of the residues 0..p − 1 without replacement, sorted; all residues if p ≤ count."""
    return torch.arange(p) if count >= p else torch.randperm(p)[:count].sort().values


def fixed_rows(p: int, count: int) -> list[Tensor]:
    """Return ``count`` of the residues 0..p − 1, the same in every run, in up to 16 groups; one group if p ≤ count."""
    drawn = splitmix64(ROWS_SEED, p).argsort()[:count]
    return [torch.arange(p)] if count >= p else [drawn[first::GROUPS] for first in range(min(GROUPS, count))]


def neuron_spectra(activations: Sequence[Tensor], p: int) -> Tensor:
    """Return the power of every neuron along b, summed over a and token positions; shape (p // 2, neurons).

    ``activations`` has one tensor per layer, its outputs on :func:`rows_of_pairs`, shape (rows·p, ..., neurons).
    """
    spectra = []
    for layer in activations:
        neurons = layer.shape[-1]
        # (rows·p, ..., neurons) as (p, rows·positions·neurons), so that each column is one signal along b
        along_b = layer.reshape(-1, p, layer[0].numel()).transpose(0, 1)
        power = power_of_columns(along_b.reshape(p, -1))
        spectra.append(power.view(len(power), -1, neurons).sum(dim=1))
    return torch.cat(spectra, dim=1)


@HookRegistry.register
@dataclass(kw_only=True, eq=False)
class Fourier(TrainingHook):
    """Measure the one-sided Fourier spectra of embedding, decoder and neurons along the vocabulary.

    Assumes that the rows of the embedding are the residues 0..n − 1 in this order. Some metrics are missing:

    * those of the decoder, if no linear layer has one row per token, or the decoder is tied to the embedding
    * those of the neurons, if the training inputs are not pairs of tokens, or no layer widens and narrows again, and
      under tensor parallelism, where each rank has only some of the neurons
    * the losses, if the targets in the first batch of the run are not (a + b) mod n, or the model does not have n
      classes

    Training pairs are those of all ranks.

    Restricted and excluded loss are exact if all pairs are measured, by default up to 20,000 pairs. For more, the hook
    measures a sample of rows: some values of a, each with all b, drawn with the same seed in every run. Waves in b or
    a − b alone then leak into waves in a + b. The metrics therefore include the average leakage (``_bias``, to be
    subtracted) and the standard error over the choice of rows (``_error``), both by the jackknife over up to 16 groups
    of rows with the correction for a finite population.

    Args:
        top_k: maximum number of key frequencies to report.
        embedding: name of the embedding's parameter; empty: the weight of the model's first ``nn.Embedding``.
        decoder: name of the output projection's parameter; empty: the last ``nn.Linear`` with a row for each token.
        period: use the first ``period`` rows of both, the numbers 0..period − 1; 0: all rows.
        stride: s if the data are sorted by a mod s; 0: the stride of a configuration with ``p`` and ``stride``.
        key_factor: a frequency is acquired while its share of the power is at least this multiple of the even share
            1/F.
        rows: number of values of a for the losses, each paired with every b; at least 2 for errors; 0: no losses;
            default: all p for up to 20,000 pairs, otherwise 20,000/p, but at least 16.
        frequencies: the frequencies that the losses keep and remove: those of the embedding ``now`` or of the
            ``reference`` solution (--reference; Nanda et al. use those of the final model), or a list such as [3,14].
    """

    name = "fourier"
    hook_points = frozenset({HookPoint.POST_EPOCH, HookPoint.SNAPSHOT})
    needs_loader = True
    _since = Remembered[Tensor | None](None)  # start of each key frequency; NaN: not key
    _adds = Remembered[bool | None](None)  # whether the targets are sums modulo p
    metrics = """
        total_power | ΣP, P_k = 2|X_k|²/n summed over the embedding's dimensions (|X_k|²/n at k = n/2), k = 1..F, F =
            ⌊n/2⌋ | [0, ∞) | Squared distance of the embedding's rows from their mean; 0: all tokens have the same
            embedding, and the other metrics are NaN.
        key_frequencies | the top_k frequencies k with the largest P_k (all, if F is smaller), largest first | 1..F
            | In cycles per n tokens; a model that has generalised keeps the same few frequencies.
        key_fractions | f_k = P_k / ΣP of the key frequencies | [0, 1], descending, NaN
            | The share of power at each key frequency.
        top_k_fraction | Σ f_k over the key frequencies | [top_k/F, 1], NaN
            | Near top_k/F: no structure; near 1: the embedding consists of these waves (grokked).
        gini | Σᵢ (2i − F − 1)·P₍ᵢ₎ / (F·ΣP), P₍ᵢ₎ ascending | [0, 1 − 1/F], NaN
            | 0: equal power at all frequencies; near 1: a few have all of it. Rises as the model generalises.
        entropy | −Σ f_k ln f_k | [0, ln F] nats, NaN | Falls as the power concentrates on few frequencies.
        effective_frequencies | exp(entropy) | [1, F], NaN | The number of equally strong frequencies with this entropy.
        acquired_epochs | for each key frequency the first epoch of the current unbroken series of measurements with
            f_k ≥ key_factor/F | [0, epoch], NaN
            | The epoch in which the model acquired this frequency; NaN: it is below the threshold now. A random
            embedding of at least about 32 dimensions stays below 2/F (measured for n = 97 and 997).
        acquired_count | number of frequencies with f_k ≥ key_factor/F now | 0..F/key_factor
            | The number of frequencies that the model uses.
        stride_share | Σ f_k over k in H = {j·n/s to the nearest integer, j = 1..⌊s/2⌋}, s the stride of the data's
            order | [0, 1]
            | Power at the frequencies that keep their phase between batches sorted by a mod s. It is reported for every
            strategy, so that a random order gives the baseline. Missing if no stride is known.
        stride_excess | stride_share · F/|H| | [0, F/|H|] | 1: no preference for the harmonics of the data's order.
        decoder_key_frequencies | key_frequencies of the rows 0..n − 1 of the output projection's weight | 1..F
            | Equal to those of the embedding: the model decodes the frequencies that it embeds.
        decoder_key_fractions | f_k of the output projection at these | [0, 1], descending, NaN
            | The share of power at each of these frequencies.
        decoder_top_k_fraction | Σ of decoder_key_fractions | [top_k/F, 1], NaN | Near 1: no other frequencies are
            decoded.
        decoder_gini | gini of the output projection's spectrum | [0, 1 − 1/F], NaN | Often rises earlier than gini.
        neuron_key_frequencies | key_frequencies of the outputs of the feed-forward layers' first linear maps (before
            the nonlinearity), on the pairs (a, b) of 4 random a with all b; spectrum along b, summed over a, token
            positions, neurons, layers | 1..F | At SNAPSHOT, in eval mode. The frequencies to which the neurons respond.
        neuron_key_fractions | f_k of this spectrum at these | [0, 1], descending, NaN
            | The share of power at each of these frequencies.
        neuron_top_k_fraction | Σ of neuron_key_fractions | [top_k/F, 1], NaN | Near 1: no other frequencies are used.
        neuron_gini | gini of this spectrum | [0, 1 − 1/F], NaN | Rises as the neurons specialise on the same
            frequencies.
        neuron_purity | mean over neurons of max_k P_k / ΣP, P the spectrum of one neuron; without constant neurons
            | [1/F, 1], NaN | Near 1: each neuron responds to a single frequency.
        restricted_loss | mean cross-entropy of L̄ + Π(L) over pairs (a, b) of `rows` a with all b; L the logits in eval
            mode, L̄ their mean, Π the projection onto cos and sin(2πk(a + b)/p) of the frequencies k in
            loss_frequencies (2 dimensions each; arXiv 2301.05217) | [0, ∞) | The loss with only these
            frequencies: falls while the circuit forms, long before full_loss.
        excluded_loss | mean cross-entropy of L − Π(L) over those of these pairs that are training pairs | [0, ∞), NaN
            | The training loss without these frequencies: low during memorisation, rises when the circuit replaces it.
            NaN: no training pair was drawn.
        full_loss | mean cross-entropy of L over the same pairs | [0, ∞) | The baseline of restricted_loss.
        full_train_loss | mean cross-entropy of L over those of the pairs that are training pairs | [0, ∞), NaN
            | The baseline of excluded_loss.
        loss_frequencies | the frequencies k that restricted_loss keeps and excluded_loss removes | 1..F
            | By default the current key_frequencies of the embedding.
        loss_rows | R, the number of values of a in the pairs of the losses | 1..p | p: all pairs, and no errors.
        restricted_loss_bias | (1 − R/p)(G − 1)(mean of x₋ᵢ − x), x the loss, x₋ᵢ without group i of the G of rows
            | (−∞, ∞)
            | The average excess of restricted_loss due to the sampling of rows. This and all metrics below are missing
            if all p rows are measured.
        excluded_loss_bias | as restricted_loss_bias | (−∞, ∞)
            | The average excess of excluded_loss due to the sampling of rows.
        restricted_loss_error | √((1 − R/p)(G − 1)/G Σᵢ (x₋ᵢ − mean x₋)²) | [0, ∞)
            | The standard error of restricted_loss over the choice of rows; conservative, in simulations up to 1.5
            times the observed deviation. For an interval multiply it, and the errors below, by Student's t for G − 1
            degrees of freedom (2.13 for 16 groups); measured coverage is below.
        excluded_loss_error | as restricted_loss_error | [0, ∞) | The standard error of excluded_loss.
        full_loss_error | as restricted_loss_error | [0, ∞) | The standard error of full_loss.
        full_train_loss_error | as restricted_loss_error | [0, ∞) | The standard error of full_train_loss.
    """

    top_k: int = 5
    embedding: str = ""
    decoder: str = ""
    period: int = 0
    stride: int = 0
    key_factor: float = 2.0
    rows: int | None = None
    frequencies: list[int] | Literal["now", "reference"] = "now"

    def __post_init__(self) -> None:
        for option, value, least in (("top_k", self.top_k, 1), ("stride", self.stride, 0), ("rows", self.rows or 0, 0)):
            require(value >= least, f"fourier.{option} is {value}; it must be at least {least}.")
        period, frequencies = self.period, self.frequencies
        require(period == 0 or period >= 2, f"fourier.period is {period}; it must be 0 (all rows) or at least 2.")
        require(self.key_factor > 0, f"fourier.key_factor is {self.key_factor}; it must be positive.")
        are_distinct = not isinstance(frequencies, str) and len(set(frequencies)) == len(frequencies) > 0
        kinds = "now, reference or a list of different frequencies"
        is_valid = are_distinct or frequencies in ("now", "reference")
        require(is_valid, f"fourier.frequencies is {frequencies!r}; it must be {kinds}.")
        self.uses_reference_weights = frequencies == "reference"
        self._loop = "epoch"

    def start(self, run: RunInfo) -> None:
        """Find the embedding, and check the options and the targets.

        Raises:
            UnsuitableError: the model has no embedding that fits the options, or a reference solution is missing.
        """
        self._loop = run.loop
        name = self.embedding or first_embedding(run.model, self.name)
        length = self._checked_length(run.model, name, "embedding")
        if self.decoder:
            self._checked_length(run.model, self.decoder, "decoder")
        if self.stride > length // 2:
            raise UnsuitableError(
                f"fourier.stride is {self.stride}, but {length} rows have only {length // 2} frequencies; it must "
                f"be at most {length // 2}."
            )
        self._check_losses(run, length)
        with preserved_loader(run.task.loader):
            self._adds = self._targets_are_sums(next(iter(run.task.loader.batches(0)), None), length, run.ranks)
        if self._adds and self.rows != 0 and run.steps_per_epoch >= ENDLESS:
            raise UnsuitableError(
                "Hook 'fourier' compares losses on the rows of an epoch, but the training data have no length; give "
                "scope.batches and loader= a DataLoader with a length, or set fourier.rows to 0."
            )

    def _check_losses(self, run: RunInfo, length: int) -> None:
        if self.frequencies == "reference" and run.reference_weights is None:
            raise UnsuitableError(
                "fourier.frequencies is 'reference', but the run has no reference solution; name a run or a file of "
                f"final weights with {option_text('reference', 'PATH')}."
            )
        chosen = [] if isinstance(self.frequencies, str) else self.frequencies
        if beyond := [k for k in chosen if k not in range(1, length // 2 + 1)]:
            raise UnsuitableError(
                f"fourier.frequencies names {listed(beyond)}; {length} rows have the frequencies 1 to {length // 2}."
            )
        if self.rows == 1 < length:
            notice(
                "fourier.rows is 1; bias and error of restricted and excluded loss need at least 2 "
                f"rows ({hook_option_text(self.name, rows=2)})."
            )

    def _checked_length(self, model: nn.Module, name: str, option: str) -> int:
        rows = len(find_matrix(model, name, f"fourier.{option}"))
        length = self.period or rows
        if not 2 <= length <= rows:
            raise UnsuitableError(
                f"fourier.period is {self.period}, but {name!r} has {rows} rows; at least 2 are needed."
            )
        return length

    def compute(self, ctx: RunDataContext) -> Metrics:
        """Return the spectra of the weights at POST_EPOCH, and of the neurons with the losses at SNAPSHOT."""
        name = self.embedding or first_embedding(ctx.model, self.name)
        table = unsharded(ctx.model.get_parameter(name))[: self.period or None]
        power = one_sided_power(table)
        metrics: dict[str, Any] = {}
        if ctx.hook_point is HookPoint.POST_EPOCH or self._loop == "step":
            metrics |= self._embedding_metrics(power, ctx.epoch)
            if decoder := self.decoder or output_projection(ctx.model, name):
                rows = unsharded(ctx.model.get_parameter(decoder))[: len(table)]
                metrics |= spectrum(one_sided_power(rows), self.top_k, "decoder_")
            if harmonics := stride_harmonics(len(table), self.stride or data_stride(ctx.config, len(table))):
                # Σ f_k over the harmonics H, and its ratio to the share |H|/F of a flat spectrum of F frequencies
                share = power[[frequency - 1 for frequency in harmonics]].sum() / power.sum()
                metrics |= {"stride_share": share, "stride_excess": share * (len(power) / len(harmonics))}
        if ctx.hook_point is HookPoint.SNAPSHOT:
            metrics |= self._pair_metrics(ctx, power, len(table))
        return metrics

    def _embedding_metrics(self, power: Tensor, epoch: int) -> dict[str, Any]:
        metrics = spectrum(power, self.top_k)
        fractions = power / power.sum()
        entropy = entropy_of_shares(fractions)
        since = torch.full_like(power, torch.nan) if self._since is None else self._since.to(power.device)
        self._since = acquisition(since, fractions * len(power) >= self.key_factor, epoch)
        keys = torch.stack(metrics["key_frequencies"]) - 1
        return metrics | {
            "total_power": power.sum(),
            "entropy": entropy,
            "effective_frequencies": entropy.exp(),
            "acquired_epochs": list(self._since[keys]),
            "acquired_count": (~self._since.isnan()).sum(),
        }

    def _pair_metrics(self, ctx: RunDataContext, power: Tensor, p: int) -> dict[str, Any]:
        """Return the metrics on pairs of tokens; empty if the training inputs are not pairs."""
        first_batch = next(ctx.loader.batches(ctx.epoch), None)
        if token_pairs(first_batch) is None:
            return {}
        if self._adds is None:
            self._adds = self._targets_are_sums(first_batch, p, ctx.ranks)
        metrics = self._neuron_metrics(ctx, p, power.device)
        if self._adds and self.rows != 0:
            metrics |= self._losses(ctx, power, p)
        return metrics

    def _targets_are_sums(self, batch: Any, p: int, ranks: Ranks) -> bool:
        """Return whether on every rank the targets of the batch are the sums of its pairs modulo p."""
        labelled_pairs = token_pairs(batch)
        are_sums = labelled_pairs is not None and bool((labelled_pairs[0].sum(dim=1) % p == labelled_pairs[1]).all())
        ranks.join()
        return all(ranks.gather(are_sums))

    def _neuron_metrics(self, ctx: RunDataContext, p: int, device: torch.device) -> dict[str, Any]:
        layers = feed_forward_inputs(ctx.model)
        if not layers or ctx.ranks.shares_layers:
            return {}
        pairs = rows_of_pairs(sampled_rows(p, NEURON_ROWS).to(device), p)
        captured = ctx.forward(pairs, capture=layers).captured
        power = neuron_spectra([captured[layer] for layer in layers], p)
        # max_k P_k/ΣP is NaN for a constant neuron, which nanmean leaves out.
        purity = (power.max(dim=0).values / power.sum(dim=0)).nanmean()
        return spectrum(power.sum(dim=1), self.top_k, "neuron_") | {"neuron_purity": purity}

    def _losses(self, ctx: RunDataContext, power: Tensor, p: int) -> dict[str, Any]:
        """Return the losses with kept and removed frequencies; empty if the model does not have p classes."""
        count = min(p, self.rows or (p if p * p <= ALL_PAIRS else max(GROUPS, ALL_PAIRS // p)))
        groups = [rows.to(power.device) for rows in fixed_rows(p, count)]
        size = max(1, min(PAIRS_AT_ONCE, LOGITS_AT_ONCE // p))
        pieces = [piece for rows in groups for piece in rows_of_pairs(rows, p).split(size)]  # type: ignore[no-untyped-call]
        logits = ctx.forward(pieces[0]).output
        if not isinstance(logits, Tensor) or logits.shape != (len(pieces[0]), p):
            return {}
        kept = [logits.to(torch.promote_types(logits.dtype, torch.float32))]
        # ablated_losses needs two passes: few logits are kept in memory, many are computed twice.
        dtype, fits = kept[0].dtype, count * p * p <= LOGITS_AT_ONCE
        kept += [ctx.forward(piece).output.to(dtype) for piece in pieces[1:] if fits]

        def sweep() -> Iterator[tuple[Tensor, Tensor]]:
            yield from zip(pieces, kept, strict=False)
            for piece in pieces[len(kept) :]:
                yield piece, ctx.forward(piece).output.to(dtype)

        training = [item[0] for batch in ctx.loader.batches(ctx.epoch) if (item := token_pairs(batch)) is not None]
        if ctx.ranks.data:
            ctx.ranks.join()
            training = ctx.ranks.gather(torch.cat(training).cpu())
        frequencies = self._kept_frequencies(ctx, power)
        losses = ablated_losses(sweep, p, frequencies, torch.cat(training).to(power.device), groups)
        return losses | {"loss_frequencies": list(frequencies), "loss_rows": count}

    def _kept_frequencies(self, ctx: RunDataContext, power: Tensor) -> Tensor:
        """Return the frequencies of the losses: the given ones, or the strongest, now or in the reference solution."""
        if not isinstance(self.frequencies, str):
            return torch.tensor(self.frequencies, device=power.device)
        if self.frequencies == "reference" and ctx.reference_weights is not None:
            name = self.embedding or first_embedding(ctx.model, self.name)
            power = one_sided_power(unsharded(ctx.reference_weights[name])[: self.period or None])
        return power.topk(min(self.top_k, len(power))).indices + 1
