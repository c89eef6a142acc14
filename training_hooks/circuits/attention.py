"""Attention heads: the entropy of their attention on fixed samples, and the spectra of their circuits."""

import inspect
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import partial
from operator import methodcaller
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from loopscope import HookPoint, HookRegistry, Remembered, RunDataContext, TrainingHook
from loopscope.data import Loader, rows
from loopscope.errors import UnsuitableError, listed, require, shortened, warn
from loopscope.hooks import Metrics, RunInfo
from loopscope.option_words import hook_option_text
from loopscope.training import Ranks
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ..measures import FamilyFile, SeriesBudget, drawn_loader, effective_rank, leading_share, notice
from .attention_layers import AttentionLayer, HeadWeights, check_head_names, find_attention
from .attention_scores import HeadsCall, RowStatistics, record_attention, sampling_error

PIECE = 16  # samples per forward pass, because the logits of a language model need much memory


def model_inputs(batch: Any, entry: str = "", arguments: Mapping[str, inspect.Parameter] = MappingProxyType({})) -> Any:
    """Return the model's input in a batch, or the tuple of its inputs in the order of the forward method.

    * of a tensor or an array: the batch itself
    * of a tuple or list: the input in the first item; if that is a tuple or list, the inputs in all its items
    * of a mapping or a dataclass: the item or field ``entry``, by default ``input_ids``. If ``entry`` is one of the
      ``arguments`` of the forward method, all other items that are arguments, such as a mask, are inputs too.

    Raises:
        UnsuitableError: the batch has another type, or no item ``entry``.
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
                f"{shortened(listed([*batch]), 80)}; name the model's input with "
                f"{hook_option_text('attention', entry='NAME')}."
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
    has_several = isinstance(first, (tuple, list))
    return tuple(model_inputs(item, entry) for item in first) if has_several else model_inputs(first, entry, arguments)


def forward_arguments(model: nn.Module) -> dict[str, inspect.Parameter]:
    """Return the named positional arguments of a model's forward method, in order."""
    parameters = inspect.signature(model.forward).parameters
    return {name: item for name, item in parameters.items() if item.kind is item.POSITIONAL_OR_KEYWORD}


def _cut(tensor: Tensor, count: int, part: slice) -> Tensor:
    # The first dimension of a tensor with another length is not that of the samples, so it stays uncut.
    return tensor[part] if tensor.ndim and len(tensor) == count else tensor


def split_inputs(batches: Iterable[Any], most: int) -> Iterator[Any]:
    """Yield the first ``most`` samples of ``batches``, at most :data:`PIECE` at a time."""
    for inputs in batches:
        count = rows(inputs)
        for first in range(0, min(count, most), PIECE):
            part = slice(first, min(first + PIECE, most))
            yield tree_map_only(Tensor, partial(_cut, count=count, part=part), inputs)
        most -= count
        if most <= 0:
            return


def product_spectrum(left: Tensor, right: Tensor) -> Tensor:
    """Return the min(r, m, n) largest singular values of LᵀR for each head, descending; the others are zero.

    From the QR decompositions Lᵀ = Q_L R_L and Rᵀ = Q_R R_R follows LᵀR = Q_L (R_L R_Rᵀ) Q_Rᵀ, so the singular values
    are those of the small matrix R_L R_Rᵀ.

    ``left`` is L, shape (heads, r, m), ``right`` R, shape (heads, r, n). Returns float64, shape (heads, min(r, m, n));
    NaN for a head with a non-finite element.
    """
    finite = left.isfinite().all(dim=(1, 2)) & right.isfinite().all(dim=(1, 2))
    cleaned = (matrix.double().where(finite[:, None, None], 0) for matrix in (left, right))
    r_left, r_right = (torch.linalg.qr(matrix.mT, mode="r").R for matrix in cleaned)
    values: Tensor = torch.linalg.svdvals(r_left @ r_right.mT)
    return values.where(finite[:, None], torch.nan)


def copying_score(output: Tensor, value: Tensor) -> Tensor:
    """Return Σλ/Σ|λ| over the eigenvalues λ of W_O W_V for each head: 1 if all are positive reals, −1 if negative.

    The nonzero eigenvalues are those of the small matrix W_V W_O, whose trace is Σλ (Elhage et al. 2021).

    ``output`` is W_O, shape (heads, width, value_dim), ``value`` W_V, shape (heads, value_dim, width). Returns float64,
    shape (heads,), in [−1, 1]; NaN if all eigenvalues are zero or an element is not finite.
    """
    small = value.double() @ output.double()
    finite = small.isfinite().all(dim=(1, 2))
    # A NaN can crash the process in eigvals (oneMKL), so decompose zeros instead and replace the result.
    eigenvalues = torch.linalg.eigvals(small.where(finite[:, None, None], 0))
    score = torch.div(eigenvalues.real.sum(dim=-1), eigenvalues.abs().sum(dim=-1))
    return score.where(finite, torch.nan)


ROWS = """
    entropy/<parameter> | mean over samples and queries of −Σ p ln p, p the attention of one head (named layer.head)
        over its keys, renormalised without sinks, which are no keys; rows without visible keys are excluded
        | [0, ln keys] nats | 0: the head attends to one key; ln of the visible keys: it averages over all. A collapse
        towards 0 precedes instability (Zhai et al. 2023).
    normalised_entropy/<parameter> | mean over rows with n ≥ 2 visible keys of (−Σ p ln p)/ln n | [0, 1]
        | The same, comparable between lengths and under a causal mask. NaN: no row has two visible keys.
    max_logit/<parameter> | max over samples, queries and visible keys of the score before the softmax, with scale and
        biases, before a layer subtracts the maximum of a row | (−∞, ∞) | Unbounded growth saturates the softmax, and
        makes training in low precision fail (Dehghani et al. 2023). More samples can only raise a maximum, so compare
        it at equal `rows`. NaN: the layer subtracts each row's maximum in a way that the hook cannot read.
    entropy_error/<parameter> | √(K/(K−1)·Σ(sₖ − mean·cₖ)²)/Σc over K samples, s and c a sample's sum and number of rows
        (Cochran 1977, section 6.4) | [0, ∞) nats
        | The standard error of entropy over samples, s/√K for samples of equal length: of 100 draws of 64 samples, 95
        differ by less than two standard errors from the value of all data. It falls as 1/√rows. Missing for fewer than
        two samples.
    normalised_entropy_error/<parameter> | the same for normalised_entropy | [0, ∞)
        | The standard error of normalised_entropy over samples. Its measured coverage, and that of the other errors,
        is below.
    mean_entropy | mean over all heads of entropy | [0, ∞) nats | Sharpness of the whole model.
    mean_entropy_error | √(K/(K−1)·Σ(mean over all heads of (sₖ − mean·cₖ)/Σc)²) | [0, ∞) nats
        | The standard error of mean_entropy over samples; also missing if layers process different numbers of samples.
    rows | samples in the forward passes | [1, ∞) | The number of samples behind all metrics above.
    mean_normalised_entropy | mean over all heads of normalised_entropy, without NaNs | [0, 1]
        | 1: no head has learned to select keys.
    largest_logit | max over all heads of max_logit | (−∞, ∞) | The single most important number for stability.
"""
CIRCUIT = """
    {kind}_spectrum/<parameter> | the largest singular values σ of {product} of one head (named layer.head), descending
        (SNAPSHOT) | [0, ∞) | A gap after the k-th value: the head uses k directions.
    {kind}_norm/<parameter> | ‖{product}‖_F (SNAPSHOT) | [0, ∞) | The strength of the circuit.
    {kind}_effective_rank/<parameter> | exp(−Σ p ln p), p = σ/Σσ of {product} over its head_dim singular values
        (SNAPSHOT) | [1, head_dim], NaN
        | The number of directions in use; falls while the head specialises. NaN: the circuit is zero.
    {kind}_leading_share/<parameter> | σ₁²/Σσ² of {product} (SNAPSHOT) | [1/head_dim, 1], NaN
        | 1: the circuit has a single direction.
    mean_{kind}_effective_rank | mean over all heads of {kind}_effective_rank, without NaNs (SNAPSHOT) | [1, ∞), NaN
        | The average number of directions per head.
"""
"""Metrics of a circuit, a product of projections, of kind qk or ov."""
COPYING = """
    ov_copying/<parameter> | Σλ/Σ|λ| over the eigenvalues λ of W_O W_V of one head (Elhage et al. 2021; SNAPSHOT)
        | [−1, 1], NaN | 1: the head adds the residual that it attends to (copying); near 0: it adds something else; −1:
        it subtracts it. This concerns the residual stream, not tokens. Missing if W_O W_V is not square.
    mean_ov_copying | mean over all heads of ov_copying, without NaNs (SNAPSHOT) | [−1, 1], NaN
        | Near 1: the attention of the model mostly copies.
"""


@HookRegistry.register
class Attention(TrainingHook):
    """Measure each attention head: entropy and largest score of its rows, and the structure of its circuits.

    Entropy and scores are measured after every ``every``-th epoch and at SNAPSHOT, from forward passes in eval mode.
    Their samples are drawn with a fixed seed: they are the same at every call and in every run on the same data in any
    order, so equal weights give equal numbers. If a loader cannot draw samples, as for a stream, the hook uses the
    first samples and issues a notice. The scores are recorded from the layers' calls of ``nn.MultiheadAttention``,
    ``scaled_dot_product_attention`` or a softmax over (batch, heads, queries, keys), with masks, and recomputed in
    float32 or wider. The circuits W_QᵀW_K (the pairs of residuals that a head scores) and W_O W_V (the residual that it
    moves) are measured at SNAPSHOT, from QR decompositions (Elhage et al. 2021).

    A layer is an ``nn.MultiheadAttention``, or a module whose submodules for queries, keys, values and output are
    ``nn.Linear`` or the ``Conv1D`` of Hugging Face and have usual names (``q_proj``, ``query``, ``wq``, fused ``qkv``,
    ``c_attn``, ``query_key_value``, ... and ``out_proj``, ``o_proj``, ``dense``, ...; other names: ``projections``).
    This covers GPT-2, GPT-NeoX, BERT, Llama and similar models, with as many key heads as query heads or fewer. The
    rows of a fused projection are all queries, all keys, all values, or grouped by key head; the hook takes the order
    that agrees with the recorded values, and decides by the name if no values were recorded.

    Assumes batches that start with the model's input, or are mappings. The circuits exclude biases, the gain of norms,
    and rotary and other position encodings. Attention that is computed in another way (flex attention, nested tensors)
    is skipped with one warning. Unsuitable under tensor parallelism, where each rank has only some of the heads.

    Args:
        rows: maximum number of samples in the forward passes, 16 at a time; errors need at least 2. With several
            processes each rank measures an equal share from its own rows.
        every: epochs between two measurements of entropy and scores.
        projections: names of the layers' submodules, ``QUERY,KEY,VALUE,OUTPUT`` or ``FUSED,OUTPUT``; empty: usual
            names.
        entry: the item or field of a batch that is the model's input, if items have names; empty: ``input_ids``.
        spectrum: number of singular values to report per circuit.
        names: globs, separated by commas, of heads (layer.head) that are always reported.
        top: number of heads with the largest values that each family of metrics reports in addition.
        bottom: number of heads with the smallest values that each family reports in addition.
        write_all: write the values of all heads to a file in the run's folder.
    """

    name = "attention"
    hook_points = frozenset({HookPoint.POST_EPOCH, HookPoint.SNAPSHOT})
    needs_loader = True
    _layers = Remembered(dict[str, AttentionLayer], saved=False)
    _inputs = Remembered(list[Any], saved=False)
    _outputs = Remembered[Mapping[str, Tensor]](dict, saved=False)
    _calls = Remembered[Mapping[str, HeadsCall]](dict, saved=False)
    _read_at = Remembered[int | None](None, saved=False)
    _skipped = Remembered(set[str], saved=False)
    _file = Remembered(FamilyFile, merged=True)
    metrics = (
        ROWS + CIRCUIT.format(kind="qk", product="W_QᵀW_K") + CIRCUIT.format(kind="ov", product="W_O W_V") + COPYING
    )

    def __init__(
        self,
        *,
        rows: int = 64,
        every: int = 2,
        projections: str = "",
        entry: str = "",
        spectrum: int = 4,
        names: str = "",
        top: int = 10,
        bottom: int = 5,
        write_all: bool = False,
    ) -> None:
        for option, value in (("rows", rows), ("every", every), ("spectrum", spectrum)):
            require(value >= 1, f"attention.{option} is {value}; it must be at least 1.")
        self._rows, self._every, self._spectrum = rows, every, spectrum
        self._projections, self._entry = projections, entry
        self._budget, self._write_all = SeriesBudget(self.name, names, top, bottom), write_all

    @classmethod
    def file_names(cls, strategy: str) -> Sequence[str]:
        """Return the name of the file of ``write_all``."""
        return [FamilyFile.name(cls.name, strategy)]

    def start(self, run: RunInfo) -> None:
        """Find the layers and draw the samples.

        Raises:
            UnsuitableError: the model has no known attention layer, the batches no known input, or the run shards
                layers over ranks.
        """
        self._layers = find_attention(run.model, self._projections)
        if run.ranks.shares_layers:
            raise UnsuitableError(
                "Hook 'attention' needs all heads of a layer, but under tensor parallelism each rank has only some of "
                "them; measure the saved weights in a run without tensor parallelism."
            )
        self._draw(run.model, run.task.loader, run.ranks)
        check_head_names(self._budget, self._layers)
        if self._write_all:
            self._file.start(self.name, run)
        if self._rows < 2:
            notice(f"attention.rows is {self._rows}; attention/entropy_error needs at least 2.")

    def compute(self, ctx: RunDataContext) -> Metrics:
        """Return the metrics of the rows, unless reported at this step already; at SNAPSHOT also the circuits."""
        if ctx.hook_point is HookPoint.POST_EPOCH and (ctx.epoch + 1) % self._every:
            return {}
        self._layers = self._layers or find_attention(ctx.model, self._projections)
        metrics: dict[str, Any] = {}
        if self._read_at != ctx.step:
            self._read(ctx)
            metrics |= _row_metrics(self._calls)
        return self._chosen(metrics | (self._circuits() if ctx.hook_point is HookPoint.SNAPSHOT else {}), ctx.step)

    def _chosen(self, metrics: Mapping[str, Any], step: int) -> Metrics:
        """Return the metrics without the heads that the budget leaves out, after one transfer of all heads' values.

        A spectrum is ranked by its largest singular value. If all heads are reported, the values stay on their device.
        """
        families: dict[str, dict[str, Any]] = {}
        for key, value in metrics.items():
            family, separator, head = key.partition("/")
            if separator:
                families.setdefault(family, {})[head] = value
        heads = max(map(len, families.values()), default=0)
        if heads <= max(self._budget.top, self._budget.bottom) and not self._write_all:
            return metrics
        lists = {family: {head: _as_list(value) for head, value in part.items()} for family, part in families.items()}
        flat = [number for part in lists.values() for numbers in part.values() for number in numbers]
        on_host = iter(_join_heads([number.reshape(1) for number in flat]).tolist() if flat else [])
        host = {
            family: {head: [next(on_host) for _ in numbers] for head, numbers in part.items()}
            for family, part in lists.items()
        }
        if self._write_all:
            self._file.append(step, {family: _flattened(part) for family, part in host.items()})
        chosen = {key: value for key, value in metrics.items() if "/" not in key}
        for family, part in host.items():
            names = self._budget.choose({head: numbers[0] for head, numbers in part.items()})
            chosen |= {f"{family}/{head}": families[family][head] for head in names}
        return chosen

    def _draw(self, model: nn.Module, loader: Loader, ranks: Ranks) -> None:
        # The samples depend on the loader's data only, so they are not part of the hook's state.
        arguments, device = forward_arguments(model), next(model.parameters()).device
        drawn = drawn_loader(self.name, loader).batches(0)
        batches = (model_inputs(batch, self._entry, arguments) for batch in drawn)
        move = methodcaller("to", device)
        pieces = [tree_map_only(Tensor, move, piece) for piece in split_inputs(batches, -(-self._rows // ranks.size))]
        ranks.join()
        self._inputs = pieces[: min(ranks.gather(len(pieces)))]  # equally many passes on all ranks

    def _read(self, ctx: RunDataContext) -> None:
        if not self._inputs:
            self._draw(ctx.model, ctx.loader, ctx.ranks)
        modules = {name: layer.module for name, layer in self._layers.items()}
        fused = {name: layer.fused for name, layer in self._layers.items() if layer.fused is not None}
        passes = []
        for inputs in self._inputs:
            with record_attention(modules, fused) as reader:
                ctx.forward(inputs)
            passes.append(reader)
        self._outputs = passes[0].outputs
        names = [name for name in passes[0].calls if all(name in reader.calls for reader in passes)]
        tables = {name: torch.cat([reader.calls[name].statistics.table for reader in passes], dim=1) for name in names}
        if ctx.ranks.data:
            ctx.ranks.join()
            rank_tables = ctx.ranks.gather(_move_to_host(tables))
            # Back on the layers' devices: next to values on the host, each value of a circuit would be moved by itself.
            tables = {
                name: torch.cat([table[name] for table in rank_tables], dim=1).to(tables[name].device) for name in names
            }
        self._calls = {name: replace(passes[0].calls[name], statistics=RowStatistics(tables[name])) for name in names}
        self._read_at = ctx.step
        self._warn({name for name in self._layers if name not in self._calls}, "no known attention call")

    def _circuits(self) -> dict[str, Any]:
        weights: dict[str, HeadWeights] = {}
        for name, call in self._calls.items():
            split = self._layers[name].weights(call.heads, self._outputs.get(name), call.value)
            if split is not None and call.head_dim in (None, split.query.shape[1]):
                weights[name] = split
        self._warn({name for name in self._calls if name not in weights}, "projections that do not match the heads")
        return _circuit_metrics(weights, self._spectrum)

    def _warn(self, names: set[str], reason: str) -> None:
        if new_names := sorted(names - self._skipped):
            self._skipped |= names
            layers = ", ".join(new_names)
            warn(f"Hook 'attention' cannot measure some layers and skips them: {layers} ({reason}).", stacklevel=2)


def _as_list(value: Any) -> list[Tensor]:
    return value if isinstance(value, list) else [value]


def _flattened(part: Mapping[str, list[float]]) -> dict[str, float]:
    """Return the numbers of each head by name; those of a list have their place in brackets."""
    return {
        name if len(numbers) == 1 else f"{name}[{place}]": number
        for name, numbers in part.items()
        for place, number in enumerate(numbers)
    }


def _move_to_host(tables: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy tensors to the host in one transfer."""
    if not tables:
        return {}
    device = next(iter(tables.values())).device
    flat = torch.cat(
        [table.flatten().to(device) for table in tables.values()]
    ).cpu()  # cat promotes to the widest dtype
    parts = torch.split(flat, [table.numel() for table in tables.values()])
    return {name: part.view(tables[name].shape) for name, part in zip(tables, parts, strict=True)}


def _by_head(column: str, layer: str, values: Tensor) -> dict[str, Any]:
    """Return the values of a layer's heads by metric name; a value with several numbers is a list."""
    return {f"{column}/{layer}.{head}": list(value) if value.ndim else value for head, value in enumerate(values)}


def _row_metrics(calls: Mapping[str, HeadsCall]) -> dict[str, Any]:
    metrics: dict[str, Any] = {}
    layers = {layer: call.statistics for layer, call in calls.items()}
    for layer, stats in layers.items():
        columns = {"entropy": stats.entropy, "normalised_entropy": stats.normalised_entropy, "max_logit": stats.largest}
        if stats.table.shape[1] > 1:
            columns["entropy_error"] = sampling_error(stats.influence())
            columns["normalised_entropy_error"] = sampling_error(stats.influence(normalised=True))
        for column, values in columns.items():
            metrics |= _by_head(column, layer, values)
    if not layers:
        return {}
    samples = {stats.table.shape[1] for stats in layers.values()}
    if len(samples) == 1 and min(samples) > 1:
        # The heads of a sample are correlated, so their influences are averaged before they are squared.
        influence = _join_heads([stats.influence().T for stats in layers.values()])
        metrics["mean_entropy_error"] = sampling_error(influence.mean(dim=0))
    return metrics | {
        "rows": max(samples),
        "mean_entropy": _join_heads([stats.entropy for stats in layers.values()]).mean(),
        "mean_normalised_entropy": _join_heads([stats.normalised_entropy for stats in layers.values()]).nanmean(),
        "largest_logit": _join_heads([stats.largest for stats in layers.values()]).max(),
    }


def _circuit_metrics(weights: Mapping[str, HeadWeights], count: int) -> dict[str, Any]:
    metrics: dict[str, Any] = {}
    heads = defaultdict[str, list[Tensor]](list)
    for layer, split in weights.items():
        # QK circuit W_QᵀW_K and OV circuit W_O W_V, both as LᵀR with the head dimension first.
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
    return metrics | {f"mean_{name}": _join_heads(parts).nanmean() for name, parts in heads.items()}


def _join_heads(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate the heads of all layers, possibly on several devices, on the device of the first layer."""
    return torch.cat([part.to(parts[0]) for part in parts])
