"""The loss of single tokens: by position, by frequency of the token, and by the source of the text."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from loopscope import HookPoint, HookRegistry, Remembered, RunDataContext, StepSchedule, TrainingHook
from loopscope.doctor.senses import token_likelihoods
from loopscope.errors import UsageError, require
from loopscope.hooks import BackwardContext, ForwardCall, ForwardTap, Metrics, RunInfo, Tap
from loopscope.tensors import unsharded
from torch import Tensor, nn

from ..measures import FamilyFile, SeriesBudget
from .logits import RowMeasures, row_blocks
from .output_reader import OutputReader

POSITION_BINS = 16
"""Bins of positions: 0, 1, 2 to 3, 4 to 7, and so on; the last one is open."""
TENTHS = 10
"""Groups of tokens by their frequency."""


def token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the cross-entropy of each row, shape (…), float32 or float64; 0 where the target is negative.

    Args:
        logits: the logits, shape (…, C).
        targets: the class of each row, shape (…).
    """
    wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
    losses = torch.zeros(targets.numel(), dtype=wide, device=logits.device)
    flat = targets.reshape(-1)
    for place, block in row_blocks(logits):
        losses[place] = RowMeasures.of(block).losses(block, flat[place])
    return torch.where(flat >= 0, losses, 0.0).view(targets.shape)


def position_names() -> list[str]:
    """Return the names of the bins of positions.

    >>> position_names()[:4], position_names()[-1]
    (['0', '1', '2-3', '4-7'], '16384-')
    """
    ranges = [(2 ** (number - 1), 2**number - 1) for number in range(2, POSITION_BINS)]
    return ["0", "1", *(f"{first}-{last}" for first, last in ranges[:-1]), f"{ranges[-1][0]}-"]


def position_bins(positions: Tensor) -> Tensor:
    """Return the number of the bin of each position: 0 for 0, and 1 + ⌊log₂ position⌋."""
    starts = 2 ** torch.arange(POSITION_BINS - 1, device=positions.device)
    return torch.bucketize(positions, starts, right=True)


def frequency_tenths(counts: Tensor) -> Tensor:
    """Return the group 0..9 of each token, most frequent first, so that each group has about a tenth of all tokens.

    The tokens are sorted by their counts; a token is in the group that contains the middle of its part of the sum. A
    token with more than a tenth of all counts leaves groups empty (as of arXiv 2402.19449, for classes).

    Args:
        counts: the occurrences of each token, shape (V,).
    """
    ranked, order = torch.sort(counts, descending=True, stable=True)
    # Twice the middles, so that they are whole numbers: exact for any count.
    doubled_middles = 2 * ranked.cumsum(0) - ranked
    groups = (doubled_middles * TENTHS).div(2 * counts.sum().clamp(min=1), rounding_mode="floor")
    return torch.empty_like(order).scatter_(0, order, groups.clamp(max=TENTHS - 1).to(order.dtype))


def sums_by_group(losses: Tensor, groups: Tensor, counts: Tensor, number: int) -> Tensor:
    """Return the sums of losses and of tokens in each group, shape (2, number), float64.

    Args:
        losses: the loss of each token, shape (n,).
        groups: the group of each token.
        counts: whether a token counts.
        number: number of groups.
    """
    wide = losses.double()
    # One masked sum per group, since sums by index have no fixed order on some devices.
    masks = [counts & (groups == group) for group in range(number)]
    sums = [torch.where(mask, wide, 0.0).sum() for mask in masks]
    return torch.stack([torch.stack(sums), torch.stack([mask.sum() for mask in masks]).double()])


def positions_of(targets: Tensor) -> Tensor | None:
    """Return the position of each target, shape (rows, positions); ``None`` for targets of another shape."""
    return torch.arange(targets.shape[-1], device=targets.device).expand_as(targets) if targets.ndim == 2 else None


@dataclass(frozen=True)
class TokenCall:
    """The losses of one call: loss, target and position of each token, and the source tags."""

    losses: Tensor  # (…)
    targets: Tensor  # (…)
    positions: Tensor | None  # (…), for sequences
    classes: int
    tags: Any

    @classmethod
    def of(cls, logits: Tensor, targets: Tensor, tags: Any) -> "TokenCall":
        """Return the losses of a call."""
        return cls(token_losses(logits, targets), targets, positions_of(targets), logits.shape[-1], tags)

    def by_tag(self) -> tuple[list[Any], Tensor]:
        """Return the tags of rows, or of tokens, and the sums of their losses and tokens, shape (2, tags), float64.

        Raises:
            UsageError: the tags fit neither the rows nor the tokens.
        """
        counts = self.targets >= 0
        per_token = isinstance(self.tags, Tensor) and self.tags.shape == self.targets.shape
        tags = self.tags.flatten().tolist() if hasattr(self.tags, "flatten") else list(self.tags)
        shape = (self.targets.numel(), 1) if per_token else (len(self.targets), -1)
        if len(tags) != shape[0]:
            raise UsageError(
                f"token_loss.source names {len(tags)} tags for {len(self.targets)} rows; give one tag per row, or one "
                "per token in a tensor of the shape of the labels."
            )
        sums = [self.losses.double().reshape(shape).sum(1), counts.double().reshape(shape).sum(1)]
        return tags, torch.stack(sums)


@HookRegistry.register
@dataclass(kw_only=True, eq=False)
class TokenLoss(TrainingHook):
    """Measure the loss of the tokens of a step by position, by frequency of the token, and by source.

    The loss is the cross-entropy of the logits of the training's own forward passes with their targets. Logits and
    targets are found as by `output_logits`; targets equal to ``ignore_index``, or no class, do not count. Where neither
    the model's arguments nor the batch have targets, those of the loss count, with the log-probabilities that
    ``cross_entropy`` or ``nll_loss`` has saved in its graph, of several the first, unless ``labels``, ``module`` or
    ``source`` is given. The sums of losses and tokens are added up over micro-batches and ranks, so every value is a
    mean over tokens. The logits are converted to float32 in blocks, so no second copy of them exists.

    Positions are counted from 0 for the first token that predicts, in bins that double. In-context learning shows as a
    fall with the position (arXiv 2209.11895). For the frequencies, the hook counts the targets of all measured steps so
    far. The tokens are sorted by their counts and divided into ten groups, each with about a tenth of all targets:
    tenth 1 has the most frequent tokens, tenth 10 the rarest. Gradient descent learns rare tokens later than Adam does
    (arXiv 2402.19449). For a classification the groups are groups of classes, and there are no positions.

    Assumes that the rows of a batch that has no targets among the model's arguments come to the model in their order,
    each once. Weights of classes, label smoothing and auxiliary losses are not part of the measured loss: their sum is
    ``unexplained``. A token that is first seen in the measured step counts as rare. With a fused loss that computes no
    logits, nothing is measured.

    Args:
        interval: steps between two measurements.
        source: name, or position, of the source tags in the batch: one tag per row, or one per token; empty: none.
        module: name of the module whose output is the logits; empty: the model.
        labels: name of the labels among the model's arguments or in the batch, or their position; empty: labels, label,
            targets or target, or the second of a pair.
        shift: compare the logits of a token with the label of the next token: yes, no, or auto, which is yes for causal
            models of transformers.
        ignore_index: label of tokens that do not count.
        names: glob patterns, separated by commas, of sources that are always reported; ``*`` selects all.
        top: number of sources with the largest losses to report.
        bottom: number of sources with the smallest losses to report.
        write_all: write the losses of all sources, positions and tenths to a file in the run's folder.
    """

    name = "token_loss"
    hook_points = frozenset({HookPoint.PRE_STEP, HookPoint.POST_BACKWARD})
    metrics = """
        mean | Σ ℓ / n over the n tokens with a target, ℓ = −ln p(target) | [0, ∞), NaN
            | The training loss, if that is the mean cross-entropy of these tokens.
        tokens | n | 0, 1, 2, … | Falls: more padding, or more ignored tokens.
        unexplained | loss of the step − mean | (−∞, ∞), NaN
            | 0 up to rounding: the training minimises the mean above. Otherwise there are further terms (z-loss,
            balance loss, label smoothing, class weights), micro-batches with different numbers of tokens have equal
            weights, the sum is divided by another number (Hugging Face's Trainer: by all labels, including the first
            of each row, which no token predicts), or the labels are others than those found.
        position/<parameter> | mean of ℓ over the tokens with a position in 0, 1, 2-3, 4-7, …, 16384- | [0, ∞)
            | Falls with the position if the model uses the context; flat: it does not. Rising at the end: positions
            beyond those trained before.
        frequency/<parameter> | mean of ℓ over the tokens of tenth 1 (most frequent) to 10 (rarest) | [0, ∞)
            | Rises with the number. Rare tokens far above and not falling: the optimizer does not learn them.
        source/<parameter> | mean of ℓ over the tokens with one source tag | [0, ∞)
            | A source that rises while the others fall is forgotten, or its data are broken.
    """

    interval: int = 50
    source: str = ""
    module: str = ""
    labels: str = ""
    shift: str = "auto"
    ignore_index: int = -100
    names: str = ""
    top: int = 10
    bottom: int = 5
    write_all: bool = False

    _counts = Remembered[Tensor | None](None)
    """Occurrences of each token among the targets of the measured steps, shape (V,)."""
    _file = Remembered(FamilyFile)

    def __post_init__(self) -> None:
        require(self.interval >= 1, f"token_loss.interval is {self.interval}; it must be at least 1.")
        self.step_schedule = StepSchedule(mode="stride", every_n_steps=self.interval)
        self._reader = OutputReader(
            self.name,
            module=self.module,
            labels=self.labels,
            shift=self.shift,
            ignore_index=self.ignore_index,
            source=self.source,
            needs_targets=True,
        )
        self._budget = SeriesBudget(self.name, self.names, self.top, self.bottom)
        self._run: RunInfo | None = None
        self._calls: list[TokenCall] = []
        self._of_graph: dict[int, TokenCall | None] = {}
        """The losses of the targets in the graph of each backward pass, if the calls have no targets."""

    @classmethod
    def file_names(cls, strategy: str) -> Sequence[str]:
        """Return the name of the file with all sources."""
        return [FamilyFile.name(cls.name, strategy)]

    def start(self, run: RunInfo) -> None:
        """Find the module with the logits."""
        self._run = run
        self._reader.start(run)

    def taps(self, model: nn.Module) -> Iterable[Tap]:
        """Tap the module's output."""
        return [ForwardTap(self.module, self._add)]

    def _add(self, call: ForwardCall) -> None:
        """Compute the losses of one call."""
        reading = self._reader.read(call)
        if reading is not None and reading.targets is not None:
            self._calls.append(TokenCall.of(reading.logits, reading.targets, reading.tags))

    def before_backward(self, ctx: BackwardContext) -> None:
        """Read the targets of the loss if its calls have none."""
        if not ctx.is_due or not self._reader.lacks_targets or self.labels or self.module or self.source:
            return
        found = token_likelihoods(ctx.loss, is_scaled=ctx.is_scaled)
        self._of_graph[ctx.index] = (
            None
            if found is None
            else TokenCall(found.losses, found.targets, positions_of(found.targets), found.classes, None)
        )

    def compute(self, ctx: RunDataContext) -> Metrics:
        """Clear the losses at PRE_STEP; at POST_BACKWARD return the measures of the step."""
        if ctx.hook_point is HookPoint.PRE_STEP:
            self._reader.begin_step(ctx.batch_data)
            self._calls.clear()
            self._of_graph.clear()
            return {}
        ctx.ranks.join()
        self._reader.finish_step()
        of_graph = [call for call in self._of_graph.values() if call is not None]
        if of_graph and len(of_graph) == len(self._of_graph) == max(self._of_graph) + 1:  # of every pass of the step
            self._calls, self._reader.problem = of_graph, ""
        if ctx.ranks.agree(bool(self._reader.problem)):
            self._reader.report_problem()
            return {}
        metrics = self._measure(ctx)
        self._reader.begin_step(None)
        self._calls.clear()
        self._of_graph.clear()
        return metrics

    def _measure(self, ctx: RunDataContext) -> dict[str, Any]:
        calls = self._calls
        losses = torch.cat([call.losses.flatten() for call in calls])
        targets = torch.cat([call.targets.flatten() for call in calls])
        counted, classes = targets >= 0, targets.clamp(min=0)
        groups = {"all": (torch.zeros_like(targets), ["mean"])}
        groups["frequency"] = self._tenths(ctx, classes, counted)[classes], [str(n + 1) for n in range(TENTHS)]
        positions = [call.positions.flatten() for call in calls if call.positions is not None]
        if len(positions) == len(calls):
            groups["position"] = position_bins(torch.cat(positions)), position_names()
        sums = ctx.ranks.sums([sums_by_group(losses, of, counted, len(names)) for of, names in groups.values()])
        tagged = [call.by_tag() for call in calls] if self.source else []
        loss = losses.new_zeros(()) if ctx.loss is None else torch.as_tensor(ctx.loss).to(losses.device)
        # One transfer for all sums: empty groups, and the choice of sources, need the values.
        parts = [*sums, *(part for _, part in tagged), unsharded(loss).double()]
        flat = torch.cat([part.flatten() for part in parts]).cpu()
        *values, step_loss = torch.split(flat, [part.numel() for part in parts])
        families = {
            family: _means(names, *part.view(2, -1).tolist())
            for (family, (_, names)), part in zip(groups.items(), values, strict=False)
        }
        mean = families.pop("all").get("mean", math.nan)
        if math.isnan(mean) and not values[0][1]:
            self._reader.problem = f"no token of step {ctx.step:,} has a target, since all are ignored or no class"
            self._reader.report_problem()
        metrics: dict[str, Any] = {"mean": mean, "tokens": int(values[0][1])}
        if ctx.loss is not None:
            metrics["unexplained"] = float(step_loss) - mean
        by_call = [
            (tags, part.view(2, -1).tolist()) for (tags, _), part in zip(tagged, values[len(groups) :], strict=True)
        ]
        families["source"] = self._by_source(ctx, by_call)
        if self.write_all and self._run is not None:
            self._file.start(self.name, self._run)  # the memory of a hook may have been restored since the last step
            self._file.append(ctx.step, families)
        for family, means in families.items():
            chosen = self._budget.choose(means) if family == "source" else [*means]
            metrics |= {f"{family}/{name}": means[name] for name in chosen}
        return metrics

    def _tenths(self, ctx: RunDataContext, classes: Tensor, counted: Tensor) -> Tensor:
        """Count the targets of the step, and return the tenth of every class."""
        step_counts = torch.zeros(self._calls[0].classes, dtype=torch.int64, device=classes.device)
        step_counts.scatter_add_(0, classes, counted.long())
        (step_counts,) = ctx.ranks.sums([step_counts])
        earlier = self._counts
        self._counts = step_counts if earlier is None else earlier.to(step_counts.device) + step_counts
        return frequency_tenths(self._counts)

    def _by_source(self, ctx: RunDataContext, by_call: list[tuple[list[Any], list[list[float]]]]) -> dict[str, float]:
        """Return the mean loss of each source, over the calls and ranks."""
        if not self.source:
            return {}
        own: dict[str, tuple[float, float]] = {}
        for tags, sums in by_call:
            for tag, loss, tokens in zip(map(str, tags), *sums, strict=True):
                earlier_loss, earlier_tokens = own.get(tag, (0.0, 0.0))
                own[tag] = earlier_loss + loss, earlier_tokens + tokens
        # Ranks of a tensor-parallel group have the same rows, so all their rows count equally often.
        by_rank = ctx.ranks.gather(own)
        names = sorted({name for of_rank in by_rank for name in of_rank})
        pairs = [[of_rank[name] for of_rank in by_rank if name in of_rank] for name in names]
        losses, tokens = ([math.fsum(pair[index] for pair in of_name) for of_name in pairs] for index in (0, 1))
        return _means(names, losses, tokens)


def _means(names: Iterable[str], sums: Iterable[float], counts: Iterable[float]) -> dict[str, float]:
    """Return the means of the groups that are not empty, by name."""
    return {name: total / count for name, total, count in zip(names, sums, counts, strict=True) if count}
