"""Attention heads: how sharply each one looks on fixed samples, and the structure of its circuits."""

import inspect
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from loopscope import HookPoint, HookRegistry, Remembered, RunDataContext, TrainingHook
from loopscope.data import Loader, rows
from loopscope.errors import UnsuitableError, listed, require, shortened
from loopscope.hooks import Metrics, RunInfo
from loopscope.training import Ranks
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ..measures import drawn_loader, effective_rank, leading_share, notice
from .attention_layers import AttentionLayer, HeadWeights, find_attention
from .attention_scores import AttentionCall, RowStatistics, reading, sampling_error

PIECE = 16  # samples in a forward pass: the logits of a language model take much memory


def model_inputs(batch: Any, entry: str = "", arguments: Mapping[str, inspect.Parameter] = MappingProxyType({})) -> Any:
    """Return the model's inputs of a batch: the one, or the tuple of them in their order.

    They are the batch itself if it is a tensor or an array, its first item if it is a tuple or list (several inputs if
    that is a tuple), its item or field ``entry`` if it is a mapping or a dataclass, by default ``input_ids``: with all
    others that the model takes by name, an attention mask among them, if that is one of the ``arguments`` of its
    forward method. Raises :class:`UnsuitableError` if nothing of this is there.
    """
    if isinstance(batch, (Tensor, np.ndarray)):
        return torch.as_tensor(batch)
    if is_dataclass(batch) and not isinstance(batch, type):
        batch = {field.name: getattr(batch, field.name) for field in fields(batch)}
    if isinstance(batch, Mapping):
        entry = entry or "input_ids"
        if entry not in batch:
            raise UnsuitableError(
                f"Hook 'attention' finds no entry {shortened(entry, 40)!r} in a batch of "
                f"{shortened(listed([*batch]), 80)}; name the model's input with --hook-config attention.entry=NAME."
            )
        given = [name in batch for name in arguments]
        named = [*arguments][: len(given) - given[::-1].index(True)] if entry in arguments else []
        values = [batch[name] if name in batch else arguments[name].default for name in named]
        complete = values and all(value is not inspect.Parameter.empty for value in values)
        tensors = (torch.as_tensor(value) if isinstance(value, np.ndarray) else value for value in values)
        return tuple(tensors) if complete else model_inputs(batch[entry], entry)
    if not isinstance(batch, (tuple, list)) or not len(batch):
        raise UnsuitableError(
            "Hook 'attention' needs batches that are tensors, arrays, tuples, lists, mappings or dataclasses, not "
            f"{shortened(type(batch).__name__, 40)}."
        )
    first = batch[0]
    several = isinstance(first, (tuple, list))
    return tuple(model_inputs(each, entry) for each in first) if several else model_inputs(first, entry, arguments)


def arguments_of(model: nn.Module) -> dict[str, inspect.Parameter]:
    """Return the arguments that a model's forward method takes in order, by name."""
    parameters = inspect.signature(model.forward).parameters
    return {name: each for name, each in parameters.items() if each.kind is each.POSITIONAL_OR_KEYWORD}


def pieces_of(batches: Iterable[Any], most: int) -> Iterator[Any]:
    """Yield the inputs in ``batches`` of ``most`` samples in all, :data:`PIECE` of them at most at a time."""
    for inputs in batches:
        count = rows(inputs)
        for first in range(0, min(count, most), PIECE):
            part = slice(first, min(first + PIECE, most))
            cut = lambda each, count=count, part=part: each[part] if each.ndim and len(each) == count else each
            yield tree_map_only(Tensor, cut, inputs)  # a tensor of other length has no samples
        most -= count
        if most <= 0:
            return


def product_spectrum(left: Tensor, right: Tensor) -> Tensor:
    """Return the singular values of LᵀR for each head, the min(r, m, n) that are not zero by its shape, descending.

    With LᵀR = Q_L (R_L R_Rᵀ) Q_Rᵀ from the QR decompositions of Lᵀ and Rᵀ, they are those of a small matrix.

    ``left`` is L, shape (heads, r, m), ``right`` R, shape (heads, r, n). Returns float64, shape (heads, min(r, m, n));
    NaN for a head with an element which is not finite.
    """
    finite = left.isfinite().all(dim=(1, 2)) & right.isfinite().all(dim=(1, 2))
    cleaned = (matrix.double().where(finite[:, None, None], 0) for matrix in (left, right))
    one, other = (torch.linalg.qr(matrix.mT, mode="r").R for matrix in cleaned)
    values: Tensor = torch.linalg.svdvals(one @ other.mT)
    return values.where(finite[:, None], torch.nan)


def copying_score(output: Tensor, value: Tensor) -> Tensor:
    """Return Σλ/Σ|λ| over the eigenvalues λ of W_O W_V for each head: 1 if all are real and positive, −1 if negative.

    The eigenvalues that are not zero are those of the small W_V W_O, whose trace is Σλ (Elhage et al. 2021).

    ``output`` is W_O, shape (heads, width, value_dim), ``value`` W_V, shape (heads, value_dim, width). Returns float64,
    shape (heads,), in [−1, 1]; NaN where all eigenvalues are zero or an element is not finite.
    """
    small = value.double() @ output.double()
    finite = small.isfinite().all(dim=(1, 2))
    eigenvalues = torch.linalg.eigvals(small.where(finite[:, None, None], 0))
    score = torch.div(eigenvalues.real.sum(dim=-1), eigenvalues.abs().sum(dim=-1))
    return score.where(finite, torch.nan)


ROWS = """
    entropy/<parameter> | mean over samples and queries of −Σ p ln p, p the attention of one head (named layer.head)
        over its keys; rows that see no key left out | [0, ln keys] nats | 0: the head looks at one key; ln of the
        visible keys: it averages over all. A collapse towards 0 goes before instability (Zhai et al. 2023).
    normalised_entropy/<parameter> | mean over rows that see n ≥ 2 keys of (−Σ p ln p)/ln n | [0, 1]
        | The same, comparable between lengths and under a causal mask. NaN: no row has a choice.
    max_logit/<parameter> | max over samples, queries and visible keys of the score before the softmax, scale and biases
        included | (−∞, ∞) | Growth without end saturates the softmax, and in low precision breaks training (Dehghani et
        al. 2023). More samples only raise a maximum: compare it at equal rows.
    entropy_error/<parameter> | √(K/(K−1)·Σ(sₖ − mean·cₖ)²)/Σc over K samples, s and c a sample's sum and number of rows
        (Cochran 1977, section 6.4) | [0, ∞) nats
        | The standard error of entropy over samples, s/√K for equally long ones: of 100 draws of 64 samples 95 lie
        within two of it from what all data would give. It falls as 1/√rows. Left out below two samples.
    normalised_entropy_error/<parameter> | the same of normalised_entropy | [0, ∞) | Its standard error over samples.
    mean_entropy | mean over all heads of entropy | [0, ∞) nats | Sharpness of the whole model.
    mean_entropy_error | √(K/(K−1)·Σ(mean over all heads of (sₖ − mean·cₖ)/Σc)²) | [0, ∞) nats
        | Its standard error over samples; left out also where layers see different numbers of samples.
    rows | samples in the forward passes | [1, ∞) | The number of samples that all of these are from.
    mean_normalised_entropy | mean over all heads, NaNs left out, of normalised_entropy | [0, 1]
        | 1: no head has learnt where to look.
    largest_logit | max over all heads of max_logit | (−∞, ∞) | The one number to watch.
"""
CIRCUIT = """
    {kind}_spectrum/<parameter> | the largest singular values σ of {product} of one head (named layer.head), descending
        (SNAPSHOT) | [0, ∞) | A gap after the k-th: the head works in k directions.
    {kind}_norm/<parameter> | ‖{product}‖_F (SNAPSHOT) | [0, ∞) | How strong the circuit is.
    {kind}_effective_rank/<parameter> | exp(−Σ p ln p), p = σ/Σσ of {product} over its head_dim singular values
        (SNAPSHOT) | [1, head_dim]
        | In how many directions it works; falls as the head finds its task. NaN: the circuit is zero.
    {kind}_leading_share/<parameter> | σ₁²/Σσ² of {product} (SNAPSHOT) | [1/head_dim, 1]
        | 1: a single direction is the whole circuit.
    mean_{kind}_effective_rank | mean over all heads, NaNs left out, of {kind}_effective_rank (SNAPSHOT) | [1, ∞)
        | In how many directions the heads work on average.
"""
"""What is told of a circuit of kind qk or ov, a product of projections."""
COPYING = """
    ov_copying/<parameter> | Σλ/Σ|λ| over the eigenvalues λ of W_O W_V of one head (Elhage et al. 2021; SNAPSHOT)
        | [−1, 1] | 1: it adds what it attends to (copying); near 0: it maps to something else; −1: it takes it away. In
        the residual stream, not in tokens. Left out where W_O W_V is not square.
    mean_ov_copying | mean over all heads, NaNs left out, of ov_copying (SNAPSHOT) | [−1, 1]
        | Whether the model's attention mostly copies.
"""


@HookRegistry.register
class Attention(TrainingHook):
    """Measure each attention head: entropy and largest score of its rows, and the structure of its circuits.

    Entropy and scores after every ``every``-th epoch and at SNAPSHOT, from forward passes in eval mode over samples
    drawn by a fixed seed: the same in every fire, and in every run on the same data, whatever its order, so that at
    equal weights all orders have equal numbers (a loader that cannot draw them, of a stream, gives its first, with a
    notice). They are read from the calls that the layers make of ``nn.MultiheadAttention``,
    ``scaled_dot_product_attention`` or a softmax over (batch, heads, queries, keys), masks included, and recomputed in
    float32 or wider. The circuits W_QᵀW_K (which pairs of residuals a head scores) and W_O W_V (what it moves) at
    SNAPSHOT, from QR decompositions (Elhage et al. 2021).

    Assumes layers that are ``nn.MultiheadAttention``, or modules with ``nn.Linear`` submodules, or the ``Conv1D`` of
    Hugging Face, for queries, keys, values and output under usual names (``q_proj``, ``query``, ``wq``, fused ``qkv``,
    ``c_attn``, ``query_key_value``, ... and ``out_proj``, ``o_proj``, ``dense``, ...; otherwise ``projections`` names
    them): GPT-2, GPT-NeoX, BERT, Llama and their kin, with as many heads of keys as of queries or fewer. The rows of a
    fused projection are all queries, all keys, all values, or those of one head of keys after the other, whichever the
    values that the layer mixes confirm; where none can be seen, the name decides. Batches start with the model's input,
    or are mappings. The circuits leave out biases, the gain of norms, rotary and other positions. What a layer computes
    otherwise (flex attention, nested tensors) is not seen: it is left out with one warning. Not under tensor
    parallelism, where a rank has some of the heads.

    Args:
        rows: samples in the forward passes, at most, 16 at a time; errors need at least 2. Over several processes each
            takes its share of them from its own rows.
        every: epochs between two readings of the rows.
        projections: names of the layers' submodules, ``QUERY,KEY,VALUE,OUTPUT`` or ``FUSED,OUTPUT``; empty: known ones.
        entry: the entry of a batch, or its field, that is the model's input, where it has names; empty: ``input_ids``.
        spectrum: how many singular values of each circuit to report.
    """

    name = "attention"
    hook_points = frozenset({HookPoint.POST_EPOCH, HookPoint.SNAPSHOT})
    needs_loader = True
    _layers = Remembered(dict[str, AttentionLayer], saved=False)
    _inputs = Remembered(list[Any], saved=False)
    _outputs = Remembered[Mapping[str, Tensor]](dict, saved=False)
    _calls = Remembered[Mapping[str, AttentionCall]](dict, saved=False)
    _read_at = Remembered[int | None](lambda: None, saved=False)
    _missed = Remembered(set[str], saved=False)
    metrics = (
        ROWS + CIRCUIT.format(kind="qk", product="W_QᵀW_K") + CIRCUIT.format(kind="ov", product="W_O W_V") + COPYING
    )

    def __init__(
        self, *, rows: int = 64, every: int = 2, projections: str = "", entry: str = "", spectrum: int = 4
    ) -> None:
        for option, value in (("rows", rows), ("every", every), ("spectrum", spectrum)):
            require(value >= 1, f"attention.{option} is {value}; it must be at least 1.")
        self._rows, self._every, self._spectrum = rows, every, spectrum
        self._projections, self._entry = projections, entry

    def start(self, run: RunInfo) -> None:
        """Find the layers and draw the samples; raises :class:`UnsuitableError` where either cannot be."""
        self._layers = find_attention(run.model, self._projections)
        if run.ranks.shares_layers:
            raise UnsuitableError(
                "Hook 'attention' reads all heads of a layer, and under tensor parallelism each rank has some of them; "
                "measure the saved weights in a run without it."
            )
        self._draw(run.model, run.task.loader, run.ranks)
        if self._rows < 2:
            notice("attention/entropy has no error: that needs attention.rows of at least 2.")

    def compute(self, ctx: RunDataContext) -> Metrics:
        """Return what the rows look like, unless that was reported at this step; at SNAPSHOT also the circuits."""
        if ctx.hook_point is HookPoint.POST_EPOCH and (ctx.epoch + 1) % self._every:
            return {}
        self._layers = self._layers or find_attention(ctx.model, self._projections)
        metrics: dict[str, Any] = {}
        if self._read_at != ctx.step:
            self._read(ctx)
            metrics |= _row_metrics(self._calls)
        return metrics | (self._circuits() if ctx.hook_point is HookPoint.SNAPSHOT else {})

    def _draw(self, model: nn.Module, loader: Loader, ranks: Ranks) -> None:
        # A function of the loader's data alone, so it is kept without being part of the hook's state.
        arguments, device = arguments_of(model), next(model.parameters()).device
        drawn = drawn_loader(self.name, loader).batches(0)
        batches = (model_inputs(batch, self._entry, arguments) for batch in drawn)
        move = lambda tensor: tensor.to(device)
        pieces = [tree_map_only(Tensor, move, each) for each in pieces_of(batches, -(-self._rows // ranks.size))]
        ranks.join()
        self._inputs = pieces[: min(ranks.gather(len(pieces)))]  # all ranks make as many passes

    def _read(self, ctx: RunDataContext) -> None:
        if not self._inputs:
            self._draw(ctx.model, ctx.loader, ctx.ranks)
        modules = {name: layer.module for name, layer in self._layers.items()}
        fused = {name: layer.fused for name, layer in self._layers.items() if layer.fused is not None}
        passes = []
        for inputs in self._inputs:
            with reading(modules, fused) as reader:
                ctx.forward(inputs)
            passes.append(reader)
        self._outputs = passes[0].outputs
        seen = [name for name in passes[0].calls if all(name in each.calls for each in passes)]
        tables = {name: torch.cat([each.calls[name].statistics.table for each in passes], dim=1) for name in seen}
        if ctx.ranks.data:
            ctx.ranks.join()
            of_ranks = ctx.ranks.gather(_on_host(tables))
            tables = {name: torch.cat([each[name] for each in of_ranks], dim=1) for name in seen}
        self._calls = {name: replace(passes[0].calls[name], statistics=RowStatistics(tables[name])) for name in seen}
        self._read_at = ctx.step
        self._miss({name for name in self._layers if name not in self._calls}, "make no call of attention")

    def _circuits(self) -> dict[str, Any]:
        weights: dict[str, HeadWeights] = {}
        for name, call in self._calls.items():
            split = self._layers[name].weights(call.heads, self._outputs.get(name), call.value)
            if split is not None and call.head_dim in (None, split.query.shape[1]):
                weights[name] = split
        self._miss({name for name in self._calls if name not in weights}, "have projections unlike their heads")
        return _circuit_metrics(weights, self._spectrum)

    def _miss(self, names: set[str], reason: str) -> None:
        if fresh := sorted(names - self._missed):
            self._missed |= names
            what = f"{', '.join(fresh)} {reason} that it can read."
            warnings.warn(f"Hook 'attention' leaves out what it cannot see: {what}", stacklevel=2)


def _on_host(tables: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Bring tensors to the host in one transfer."""
    if not tables:
        return {}
    device = next(iter(tables.values())).device
    flat = torch.cat([table.flatten().to(device) for table in tables.values()]).cpu()  # in the widest dtype
    parts = torch.split(flat, [table.numel() for table in tables.values()])
    return {name: part.view(tables[name].shape) for name, part in zip(tables, parts, strict=True)}


def _by_head(column: str, layer: str, values: Tensor) -> dict[str, Any]:
    """Name the values of a layer's heads; a value of several numbers is a list."""
    return {f"{column}/{layer}.{head}": list(value) if value.ndim else value for head, value in enumerate(values)}


def _row_metrics(calls: Mapping[str, AttentionCall]) -> dict[str, Any]:
    metrics: dict[str, Any] = {}
    found = {layer: call.statistics for layer, call in calls.items()}
    for layer, each in found.items():
        columns = {"entropy": each.entropy, "normalised_entropy": each.normalised_entropy, "max_logit": each.largest}
        if each.table.shape[1] > 1:
            columns["entropy_error"] = sampling_error(each.influence())
            columns["normalised_entropy_error"] = sampling_error(each.influence(normalised=True))
        for column, values in columns.items():
            metrics |= _by_head(column, layer, values)
    if not found:
        return {}
    samples = {each.table.shape[1] for each in found.values()}
    if len(samples) == 1 and min(samples) > 1:
        influence = _joined([each.influence().T for each in found.values()])
        metrics["mean_entropy_error"] = sampling_error(influence.mean(dim=0))
    return metrics | {
        "rows": max(samples),
        "mean_entropy": _joined([each.entropy for each in found.values()]).mean(),
        "mean_normalised_entropy": _joined([each.normalised_entropy for each in found.values()]).nanmean(),
        "largest_logit": _joined([each.largest for each in found.values()]).max(),
    }


def _circuit_metrics(weights: Mapping[str, HeadWeights], count: int) -> dict[str, Any]:
    metrics: dict[str, Any] = {}
    heads = defaultdict[str, list[Tensor]](list)
    for layer, split in weights.items():
        for kind, left, right in (("qk", split.query, split.key), ("ov", split.output.mT, split.value)):
            values = product_spectrum(left, right)
            rank = effective_rank(values)
            heads[f"{kind}_effective_rank"].append(rank)
            metrics |= _by_head(f"{kind}_spectrum", layer, values[:, :count])
            metrics |= _by_head(f"{kind}_norm", layer, values.square().sum(dim=-1).sqrt())
            metrics |= _by_head(f"{kind}_effective_rank", layer, rank)
            metrics |= _by_head(f"{kind}_leading_share", layer, leading_share(values))
        if split.output.shape[1] == split.value.shape[2]:
            copying = copying_score(split.output, split.value)
            metrics |= _by_head("ov_copying", layer, copying)
            heads["ov_copying"].append(copying)
    return metrics | {f"mean_{name}": _joined(parts).nanmean() for name, parts in heads.items()}


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """Join the heads of all layers, which may lie on several devices, on the first one's."""
    return torch.cat([part.to(parts[0]) for part in parts])
