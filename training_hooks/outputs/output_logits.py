"""The logits of a model's output: log Z and its drift, the largest logit, entropy, and calibration."""

import math
from collections.abc import Iterable

import torch
from loopscope import HookPoint, HookRegistry, Remembered, RunDataContext, StepSchedule, TrainingHook
from loopscope.errors import require
from loopscope.hooks import ForwardCall, ForwardTap, Metrics, RunInfo, Tap
from torch import Tensor, nn

from .logits import RowMeasures, row_blocks
from .output_reader import OutputReader, Reading

BINS = 15
"""Bins of the confidence, as of Guo et al. (arXiv 1706.04599)."""
PLAIN = 4  # sums that need no targets: rows, log Z, (log Z)², entropy
PER_BIN = 3  # rows, confidence, correct choices


def sum_logits(logits: Tensor, targets: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return sums and maxima over the rows of logits, which are combined over calls and ranks.

    The sums, float64 of shape (4 + 15·3,), are those of rows, ln Z, (ln Z)² and entropy, and in each bin of the
    confidence p: of rows with a target, p, and correct choices. The maxima, float64 of shape (2,), are those
    of the logits and of their magnitudes. Rows with a negative target do not count.

    Args:
        logits: the logits, shape (…, C).
        targets: the class of each row, shape (…), or ``None``.
    """
    sums = torch.zeros(PLAIN + BINS * PER_BIN, dtype=torch.float64, device=logits.device)
    maxima = torch.full((2,), -math.inf, dtype=torch.float64, device=logits.device)
    flat_targets = None if targets is None else targets.reshape(-1)
    for place, block in row_blocks(logits):
        rows = RowMeasures.of(block)
        target = None if flat_targets is None else flat_targets[place]
        counts = torch.ones_like(rows.choice, dtype=torch.bool) if target is None else target >= 0
        log_z = rows.log_z.double()
        plain = torch.stack([torch.ones_like(log_z), log_z, log_z.square(), rows.entropy.double()])
        sums[:PLAIN] += torch.where(counts, plain, 0.0).sum(1)
        largest = torch.stack([rows.top_logit, torch.maximum(rows.top_logit.abs(), block.amin(-1).abs())]).double()
        if len(log_z):
            maxima = torch.maximum(maxima, torch.where(counts, largest, -math.inf).amax(1))
        if target is not None:
            sums[PLAIN:] += _sums_by_bin(rows, target, counts).flatten()
    return sums, maxima


def _sums_by_bin(rows: RowMeasures, targets: Tensor, counts: Tensor) -> Tensor:
    """Return the sums in each bin of the confidence, shape (bins, 3)."""
    confidence = rows.confidence.double()
    # Bin m holds the confidences in (m/15, (m + 1)/15].
    bins = (confidence * BINS).ceil().sub(1).clamp(0, BINS - 1).nan_to_num(0).long()
    is_in_bin = (bins[None] == torch.arange(BINS, device=bins.device)[:, None]) & counts
    correct = (rows.choice == targets).double()
    values = [torch.ones_like(confidence), confidence, correct]
    return is_in_bin.double() @ torch.stack(values, dim=1)


def calibration(by_bin: Tensor) -> dict[str, Tensor]:
    """Return the measures of calibration from the sums by bin, shape (15, 3)."""
    count, confidence, correct = by_bin.unbind(1)
    total = count.sum()
    return {
        "accuracy": correct.sum() / total,
        "confidence": confidence.sum() / total,
        "overconfidence": (confidence.sum() - correct.sum()) / total,
        "calibration_error": (correct - confidence).abs().sum() / total,
        "calibration_noise": binomial_deviation(count, confidence).sum() / total,
    }


def binomial_deviation(count: Tensor, mean: Tensor) -> Tensor:
    """Return E|X − np| of binomial X, the correct choices among n = ``count`` rows of mean confidence p = ``mean``/n.

    It is 2·k·C(n, k)·pᵏ·qⁿ⁻ᵏ⁺¹ with k = ⌊np⌋ + 1 and q = 1 − p (de Moivre), and √(2npq/π) for many rows. For a few
    rows of a confident model that limit would be far too large.

    >>> binomial_deviation(torch.tensor([1.0, 2.0, 0.0]).double(), torch.tensor([0.99, 1.0, 0.0]).double())
    tensor([0.0198, 0.5000, 0.0000], dtype=torch.float64)
    """
    share = (mean / count.clamp(min=1)).clamp(0, 1)
    k = (count * share).floor() + 1
    rest = (count - k).clamp(min=0)
    # The logarithm of the binomial coefficient; k > n only if p = 1, where there is no deviation.
    ways = torch.lgamma(count + 1) - torch.lgamma(k + 1) - torch.lgamma(rest + 1)
    logarithm = math.log(2) + k.log() + ways + torch.xlogy(k, share) + torch.xlogy(rest + 1, 1 - share)
    return torch.where(k > count, 0.0, logarithm.exp())


@HookRegistry.register
class OutputLogits(TrainingHook):
    """Measure the output logits of the training's own forward passes: log Z, the largest logit, entropy, calibration.

    The hook reads the model's output, a tensor of logits, an output with ``logits`` as of transformers, or a tuple, or
    the output of the ``module`` that is named. Every token (row) with a target counts: those whose target is
    ``ignore_index``, or no class, do not. Without known targets every row counts, and accuracy and calibration are
    omitted; an output that is neither called logits nor fits any targets is not measured, since it may be something
    else. The targets are the labels among the model's arguments (labels, label, targets, target), or those of the
    batch: its entry of these names, or the second of a pair. Logits are converted to float32 in blocks, so no second
    copy of them exists.

    Z is the sum of the exponentials of a row's logits. The cross-entropy does not depend on the mean of ln Z, so it may
    drift, until low precision makes the loss inexact; a z-loss of 1e-4·(ln Z)² stops that (PaLM, arXiv 2204.02311). The
    expected calibration error is that of Guo et al. (arXiv 1706.04599), with 15 equal bins of the confidence.

    Assumes that the rows of a batch that has no targets among the model's arguments come to the model in their order,
    each once, as in gradient accumulation. The calibration error of few rows is biased upward: ``calibration_noise`` is
    its expected value for a calibrated model with the same confidences and independent rows; tokens of one text are not
    independent, which makes it larger. The model is in train mode: dropout lowers the confidence. All metrics of a step
    in which no row counts are NaN.

    Args:
        interval: steps between two measurements.
        module: name of the module whose output is the logits; empty: the model.
        labels: name of the labels among the model's arguments or in the batch, or their position; empty: see above.
        shift: compare the logits of a token with the label of the next token: yes, no, or auto, which is yes for causal
            models of transformers.
        ignore_index: label of rows that do not count.
    """

    name = "output_logits"
    hook_points = frozenset({HookPoint.PRE_STEP, HookPoint.POST_BACKWARD})
    _first_log_z = Remembered[Tensor | None](None)
    """Mean of ln Z at the first measured step."""
    metrics = """
        log_z_mean | mean over rows of ln Z, Z = Σ_c exp x_c | (−∞, ∞)
            | Its start is about ln C + σ²/2 for C classes and logits of variance σ². Its level has no meaning; a drift
            far from 0 costs precision in bfloat16.
        log_z_std | population standard deviation of ln Z over rows | [0, ∞) | Large: the scale of the logits differs
            between rows.
        log_z_square | mean of (ln Z)² | [0, ∞) | The z-loss is 1e-4 times this. Growing steadily: add a z-loss.
        log_z_drift | log_z_mean − its value at the first measured step | (−∞, ∞)
            | Steady: fine. Growing without bound: the logits drift.
        max_logit | max x over rows and classes | (−∞, ∞)
            | Growing without bound under weight decay 0, or before a divergence.
        max_abs_logit | max |x| | [0, ∞) | bfloat16 resolves values near 256 only to 2: above that the loss is coarse.
        entropy | mean over rows of −Σ_c p_c ln p_c, p the softmax of the row | [0, ln C]
            | ln C: uniform. Falls with the loss; far below the loss: the model is overconfident.
        entropy_share | entropy / ln C | [0, 1] | 1: uniform; 0: certain.
        accuracy | share of rows whose largest logit is the target's | [0, 1] | Training accuracy of the step.
        confidence | mean over rows of max_c p_c | [1/C, 1] | Equal to the accuracy in a calibrated model.
        overconfidence | confidence − accuracy | [−1, 1] | Above 0: overconfident; below 0, as with label smoothing,
            dropout or at the start: underconfident.
        calibration_error | Σ_b |correct rows in b − Σ of their confidences| / rows, b the 15 bins ((m − 1)/15, m/15] of
            the confidence | [0, 1] | Compare with calibration_noise: not above it, no miscalibration is measurable.
        calibration_noise | Σ_b E|X_b − n_b·p_b| / rows, X_b binomial with the n_b rows and the mean confidence p_b of
            bin b | [0, √(15/(4n))] | The mean calibration error of a calibrated model on n independent rows.
    """

    def __init__(
        self, *, interval: int = 50, module: str = "", labels: str = "", shift: str = "auto", ignore_index: int = -100
    ) -> None:
        require(interval >= 1, f"output_logits.interval is {interval}; it must be at least 1.")
        self.step_schedule = StepSchedule(mode="stride", every_n_steps=interval)
        self._reader = OutputReader(self.name, module=module, labels=labels, shift=shift, ignore_index=ignore_index)
        self._sums: list[tuple[Tensor, Tensor]] = []
        self._classes = 2
        self._has_targets = False

    def start(self, run: RunInfo) -> None:
        """Find the module with the logits."""
        self._reader.start(run)

    def taps(self, model: nn.Module) -> Iterable[Tap]:
        """Tap the module's output."""
        return [ForwardTap(self._reader.module, self._add)]

    def _add(self, call: ForwardCall) -> None:
        """Add the sums of one call."""
        reading: Reading | None = self._reader.read(call)
        if reading is not None:
            self._classes, self._has_targets = reading.logits.shape[-1], reading.targets is not None
            self._sums.append(sum_logits(reading.logits, reading.targets))

    def compute(self, ctx: RunDataContext) -> Metrics:
        """Clear the sums at PRE_STEP; at POST_BACKWARD return the measures of the step."""
        if ctx.hook_point is HookPoint.PRE_STEP:
            self._reader.begin_step(ctx.batch_data)
            self._sums.clear()
            return {}
        ctx.ranks.join()
        self._reader.finish_step()
        if ctx.ranks.agree(bool(self._reader.problem)):
            self._reader.report_problem()
            return {}
        (sums,) = ctx.ranks.sums([torch.stack([sums for sums, _ in self._sums]).sum(0)])
        (maxima,) = ctx.ranks.sums([torch.stack([maxima for _, maxima in self._sums]).amax(0)], largest=True)
        self._reader.begin_step(None)
        self._sums.clear()
        return self._measure(sums, maxima)

    def _measure(self, sums: Tensor, maxima: Tensor) -> dict[str, Tensor]:
        rows, log_z, square, entropy = sums[:PLAIN].unbind()
        mean = log_z / rows
        first = mean if self._first_log_z is None else self._first_log_z.to(mean.device)
        first = torch.where(first.isnan(), mean, first)  # a step without targets has no mean
        self._first_log_z = first.clone()
        maxima = torch.where(rows > 0, maxima, torch.nan)
        metrics = {
            "log_z_mean": mean,
            "log_z_std": (square / rows - mean.square()).clamp(min=0).sqrt(),
            "log_z_square": square / rows,
            "log_z_drift": mean - first,
            "max_logit": maxima[0],
            "max_abs_logit": maxima[1],
            "entropy": entropy / rows,
            "entropy_share": (entropy / rows / math.log(self._classes)).clamp(max=1),  # equal logits, rounded
        }
        return metrics | (calibration(sums[PLAIN:].view(BINS, PER_BIN)) if self._has_targets else {})
