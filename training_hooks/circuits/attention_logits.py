"""The largest attention logit and the entropy of every head in the training passes."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial

import numpy as np
import torch
from loopscope import HookPoint, HookRegistry, Remembered, RunDataContext, StepSchedule, TrainingHook
from loopscope.errors import UnsuitableError, listed, require, shortened
from loopscope.hooks import AttentionCall, AttentionTap, Metrics, RunInfo, Tap
from loopscope.option_words import hook_option_text
from loopscope.training import Ranks
from numpy.typing import NDArray
from torch import Tensor, nn

from ..measures import FamilyFile, SeriesBudget, notice
from .attention_layers import check_head_names, is_attention
from .attention_scores import row_statistics

Table = NDArray[np.float64]
"""Statistics of the heads of one layer, shape (6, heads): the table of :class:`.RowStatistics` over all samples."""


def attention_modules(model: nn.Module, hook: str, patterns: str = "") -> list[str]:
    """Return the names of the modules that may compute attention.

    By default these are every ``nn.MultiheadAttention`` that is trained, every module with the usual projections, and
    every module whose class is called attention. ``patterns`` are globs of module names, separated by commas, instead.

    Raises:
        UnsuitableError: the model has no such module.
        UsageError: a pattern matches no module.
    """
    modules = dict(model.named_modules())
    globs = [pattern for pattern in map(str.strip, patterns.split(",")) if pattern]
    for pattern in globs:
        require(
            any(fnmatchcase(name, pattern) for name in modules),
            f"{hook}.layers has the pattern {pattern!r}, which matches no module of the model.",
        )
    if globs:
        return [name for name in modules if any(fnmatchcase(name, pattern) for pattern in globs)]
    found = {name: module for name, module in modules.items() if is_attention(module) or _is_called_attention(module)}
    names = [name for name, module in found.items() if not _may_use_fast_path(module)]
    if names:
        return names
    raise UnsuitableError(
        f"Hook {hook!r} finds no attention in {shortened(type(model).__name__, 40)}: no nn.MultiheadAttention, no "
        "linear layers named like q_proj and k_proj or qkv, and no class called attention; name the modules that "
        f"compute it with {hook_option_text(hook, layers='NAME')}."
    )


def _may_use_fast_path(module: nn.Module) -> bool:
    """Return whether a layer is a frozen ``nn.MultiheadAttention``.

    In eval mode PyTorch computes frozen layers, and encoder layers around them, by a fused function, but not if they
    have module hooks; so a tap would change the bits of the training.
    """
    return isinstance(module, nn.MultiheadAttention) and not any(p.requires_grad for p in module.parameters())


def _is_called_attention(module: nn.Module) -> bool:
    return bool(re.search("attention|attn", type(module).__name__, re.IGNORECASE))


def merged(first: Tensor, second: Tensor) -> Tensor:
    """Return the statistics of all rows from those of two parts of them, shape (6, heads)."""
    return torch.cat([first[:4] + second[:4], torch.maximum(first[4:], second[4:])])


def on_host(rows: Mapping[str, Tensor]) -> dict[str, Table]:
    """Copy statistics to the host, in one transfer from each device."""
    copies: dict[str, Table] = {}
    for device in dict.fromkeys(table.device for table in rows.values()):
        part = {layer: table for layer, table in rows.items() if table.device == device}
        flat = np.asarray(torch.cat([table.flatten() for table in part.values()]).tolist())
        ends = np.cumsum([table.numel() for table in part.values()])[:-1]
        copies |= {layer: piece.reshape(6, -1) for layer, piece in zip(part, np.split(flat, ends), strict=True)}
    return {layer: copies[layer] for layer in rows}


class StepRows:
    """The statistics of the heads in the passes of one step, over its micro-batches and all ranks."""

    def __init__(self) -> None:
        self.rows: dict[str, Tensor] = {}
        self.capped: set[str] = set()
        """Layers with soft-capped scores."""

    def add(self, layer: str, call: AttentionCall) -> None:
        """Add the rows of one attention call."""
        table = row_statistics(call).table
        table = torch.cat([table[:4].sum(dim=1), table[4:].amax(dim=1)])
        self.rows[layer] = merged(self.rows[layer], table) if layer in self.rows else table
        if call.cap is not None:
            self.capped.add(layer)

    def clear(self) -> None:
        """Discard the statistics of the last step."""
        self.rows.clear()
        self.capped.clear()

    def collected(self, ranks: Ranks) -> dict[str, Table]:
        """Return the statistics over all ranks, on the host, without layers that computed no attention."""
        rows = on_host(self.rows)
        if not ranks.data:
            return rows
        ranks.join()
        by_rank: list[dict[str, Table]] = ranks.gather(rows)
        total: dict[str, Table] = {}
        for layer, table in ((layer, table) for part in by_rank for layer, table in part.items()):
            same = total.get(layer)
            sums = table if same is None else np.concatenate([same[:4] + table[:4], np.maximum(same[4:], table[4:])])
            total[layer] = sums
        return total


@HookRegistry.register
@dataclass(kw_only=True, eq=False)
class AttentionLogits(TrainingHook):
    """Measure the largest attention logit and the entropy of every head in the passes of the training step.

    A logit is a score as it enters the softmax: scale·q·k with soft cap, position biases and masks; masked keys have no
    score. Queries and keys are read in the run's own forward pass, over all its micro-batches, with dropout and
    autocasting as they are, and multiplied again in float32 or wider, in blocks that need memory for some rows only;
    the results of the training do not change. If a layer computes its scores itself, the hook reads the input of its
    softmax: what the layer subtracts from a row, such as its maximum, is added again, and sinks (gpt-oss) are not
    counted as keys, so p is renormalised over the keys. Growing logits precede divergence (Dehghani et al. 2023, arXiv
    2302.05442; Wortsman et al. 2023, arXiv 2309.14322), as does the collapse of the entropy (Zhai et al. 2023, arXiv
    2303.06296); `qk_clip` limits them.

    The attention of ``nn.MultiheadAttention``, ``scaled_dot_product_attention``, a softmax over (batch, heads, queries,
    keys), and the flash attention of Hugging Face's models is read, in every module with usual projections
    (``q_proj``, ``c_attn``, ``qkv``, ...) or whose class is called attention. Heads may share keys (GQA), or have
    compressed ones (MLA).

    Assumes that a padding token's row is a row like others, since the model computes it. Attention in other functions
    (flex attention, flash attention called directly, nested tensors) is not read; if a module computes none that can be
    read, a notice names it. Frozen ``nn.MultiheadAttention`` is left out, since a tap would replace its fast path.
    Under tensor parallelism a rank has only some heads, so the hook is unsuitable.

    Args:
        interval: steps between two measurements.
        layers: names of the modules that compute attention, as globs separated by commas; empty: found by their names.
        names: heads (layer.head) and layers to report always, as globs separated by commas.
        top: number of heads with the largest max_logit, and of layers with the largest entropy, to report.
        bottom: number of heads with the smallest max_logit, and of layers with the smallest entropy, to report.
        write_all: write max_logit and entropy of every head to a file in the run folder at every measured step.
    """

    name = "attention_logits"
    hook_points = frozenset({HookPoint.PRE_STEP, HookPoint.POST_BACKWARD})
    _step = Remembered(StepRows, saved=False)
    _modules = Remembered(list[str], saved=False)
    _warned = Remembered(False, saved=False)
    _file = Remembered(FamilyFile)
    metrics = """
        max_logit/<parameter> | max over samples, queries and visible keys of the score of one head (named layer.head)
            as it enters the softmax | (−∞, ∞) | A few units in a fresh model, up to some tens in a trained one; steady
            growth to 100 and more saturates the softmax and precedes divergence, above all in low precision.
        largest_logit | max over all heads of max_logit | (−∞, ∞) | Above about 100 (the limit of Kimi K2) and growing:
            normalise queries and keys, lower the learning rate, or clip with qk_clip. The number is that of this
            batch, so compare batches of one size.
        largest_uncapped_logit | max of scale·q·k over visible keys, before soft caps and biases; only in models with
            soft caps | (−∞, ∞) | Far above the cap: the cap hides a growth, and gradients through it vanish.
        entropy/<parameter> | mean over heads, samples and queries of one layer of −Σ p ln p, p the softmax of the
            scores over the visible keys | [0, ln keys] nats | A collapse towards 0 in all heads of a layer precedes
            instability; single sharp heads are normal.
        mean_entropy | mean over all layers of entropy | [0, ∞) nats
            | The sharpness of the whole model; it falls while heads learn to select keys.
        mean_normalised_entropy | mean over rows with n ≥ 2 visible keys of (−Σ p ln p)/ln n, over all heads | [0, 1]
            | The same, comparable between lengths. 1: no head selects; below about 0.1: almost all rows are one-hot.
    """

    interval: int = 50
    layers: str = ""
    names: str = ""
    top: int = 10
    bottom: int = 5
    write_all: bool = False

    def __post_init__(self) -> None:
        require(self.interval >= 1, f"{self.name}.interval is {self.interval}; it must be at least 1.")
        self.step_schedule = StepSchedule(mode="stride", every_n_steps=self.interval)
        self._budget = SeriesBudget(self.name, self.names, self.top, self.bottom)

    @classmethod
    def file_names(cls, strategy: str) -> Sequence[str]:
        """Return the name of the file with all heads."""
        return [FamilyFile.name(cls.name, strategy)]

    def start(self, run: RunInfo) -> None:
        """Find the modules; raises :class:`UnsuitableError` without attention, and under tensor parallelism."""
        if run.ranks.shares_layers:
            raise UnsuitableError(
                f"Hook {self.name!r} needs all heads of a layer, but under tensor parallelism each rank has only some "
                "of them; train without tensor parallelism to measure them."
            )
        self._modules = attention_modules(run.model, self.name, self.layers)
        check_head_names(self._budget, self._modules)
        if self.write_all:
            self._file.start(self.name, run)

    def taps(self, model: nn.Module) -> Iterable[Tap]:
        """Tap the attention of every module."""
        return [AttentionTap(name, partial(self._see, name)) for name in self._modules]

    def _see(self, layer: str, call: AttentionCall) -> None:
        self._step.add(layer, call)

    def compute(self, ctx: RunDataContext) -> Metrics:
        """Clear the statistics at PRE_STEP; at POST_BACKWARD return those of the step."""
        if ctx.hook_point is HookPoint.PRE_STEP:
            self._step.clear()
            return {}
        rows = self._step.collected(ctx.ranks)
        capped = set(self._step.capped)
        self._step.clear()
        self._warn(rows)
        if not rows:
            return {}
        values = {layer: HeadValues.of(table) for layer, table in rows.items()}
        logits = _by_head({layer: value.logits for layer, value in values.items()})
        entropies = {layer: float(np.nanmean(value.entropies)) for layer, value in values.items()}
        if self.write_all:
            all_entropies = _by_head({layer: value.entropies for layer, value in values.items()})
            self._file.append(ctx.step, {"max_logit": logits, "entropy": all_entropies})
        shares = np.concatenate([table[2:4] for table in rows.values()], axis=1).sum(axis=1)
        metrics = {
            "largest_logit": float(np.max([*logits.values()])),
            "mean_entropy": float(np.mean([*entropies.values()])),
            "mean_normalised_entropy": _ratio(shares[0], shares[1]),
        }
        if capped:
            metrics["largest_uncapped_logit"] = max(float(rows[layer][5].max()) for layer in rows if layer in capped)
        metrics |= {f"max_logit/{head}": logits[head] for head in self._budget.choose(logits)}
        return metrics | {f"entropy/{layer}": entropies[layer] for layer in self._budget.choose(entropies)}

    def _warn(self, rows: Mapping[str, Table]) -> None:
        """Name once the modules whose attention cannot be read, apart from those around or inside of others."""
        if self._warned:
            return
        self._warned = True
        unread = [name for name in self._modules if not any(_are_nested(name, layer) for layer in rows)]
        if unread:
            notice(f"{self.name} reads no attention in {listed(unread, 3)}: they compute none, or in another function.")


def _are_nested(first: str, second: str) -> bool:
    return f"{first}.".startswith(f"{second}.") or f"{second}.".startswith(f"{first}.") or not (first and second)


@dataclass(frozen=True)
class HeadValues:
    """The largest logit and the entropy of each head of a layer; NaN without visible keys."""

    logits: NDArray[np.float64]
    entropies: NDArray[np.float64]

    @classmethod
    def of(cls, table: Table) -> "HeadValues":
        """Return the values from the statistics of the layer."""
        rows = np.where(table[1] > 0, table[1], np.nan)
        return cls(np.where(table[1] > 0, table[4], np.nan), table[0] / rows)


def _by_head(layers: Mapping[str, NDArray[np.float64]]) -> dict[str, float]:
    return {f"{layer}.{head}": float(value) for layer, part in layers.items() for head, value in enumerate(part)}


def _ratio(numerator: float, denominator: float) -> float:
    return float(numerator / denominator) if denominator else math.nan
