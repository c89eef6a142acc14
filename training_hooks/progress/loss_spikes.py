"""Spikes of the loss and of the gradient norm relative to the preceding steps."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from loopscope import HookPoint, HookRegistry, Remembered, RunDataContext, TrainingHook
from loopscope.errors import UnsuitableError, require
from loopscope.hooks import Alert, Metrics, RunInfo
from loopscope.option_words import hook_option_text
from loopscope.tensors import unsharded
from torch import Tensor

SMALLEST_SPREAD = 1e-10  # below this standard deviation a step has no deviation
CHUNK = 1024  # steps whose windows are in memory at once
SIGNALS = {"loss": "loss", "grad_norm": "gradient norm"}
"""The watched signals: the prefix of the metrics, and the name in sentences."""


def deviations(series: Tensor, window: int) -> Tensor:
    """Return (x − mean) / σ of every value x, with mean and σ of the preceding ``window`` values.

    Mean and population standard deviation σ ignore infinite and NaN values, which would hide all spikes for the length
    of a window. The deviation is NaN if σ < 1e-10, so no comparison with a threshold holds.

    Args:
        series: shape (signals, n); the result has shape (signals, max(0, n − window)), without the first window.
        window: number of preceding values.

    >>> deviations(torch.tensor([[1.0, 3.0, 5.0, 3.0]]), 2)
    tensor([[ 3., -1.]])
    """
    if series.shape[1] <= window:
        return series[:, :0]
    parts = []
    for start in range(0, series.shape[1] - window, CHUNK):
        part = series[:, start : start + window + CHUNK]
        preceding, values = part.unfold(1, window, 1)[:, :-1], part[:, window:]  # (signals, m, window), (signals, m)
        finite = preceding.isfinite()
        count = finite.sum(-1)
        mean = torch.where(finite, preceding, 0.0).sum(-1) / count
        scatter = torch.where(finite, preceding - mean[..., None], 0.0).square().sum(-1)
        spread = (scatter / count).sqrt()
        parts.append((values - mean) / torch.where(spread < SMALLEST_SPREAD, torch.nan, spread))
    return torch.cat(parts, dim=1)


SPIKES = """
    {prefix}_deviation | (x − mean) / σ of a step; x the {label}, mean and population standard deviation σ those of the
        `window` steps before it | (−∞, ∞)
        | Above `threshold`: a spike. The first `window` steps of a run have no value; NaN: σ < 1e-10, or x is NaN.
    {prefix}_spike_count | number of steps so far with x > mean + threshold·σ and σ ≥ 1e-10 | 0, 1, 2, …
        | Rises only early: the warm-up is too short. Rises to the end: the learning rate is too high, or single batches
        are bad.
"""
"""The metrics of one signal x; mean and σ are those of its previous ``window`` values."""


@HookRegistry.register
class LossSpikes(TrainingHook):
    """Count spikes of the loss and of the gradient norm, and warn about each of them.

    A spike is a value above the mean of the previous ``window`` steps by more than ``threshold`` standard deviations.
    Spikes enter the window like other values, so only the start of a lasting rise is a spike; infinite and NaN values
    in the window are ignored. Loss and gradient norm are those at POST_BACKWARD, before clipping, which would hide
    spikes. The hook checks every step with a known loss, and reports a spike at once. A step that a loss scaler skips
    has no gradient norm: its overflow is no spike.

    Assumes that loss and gradient norm fluctuate around a steady level within a window: a steep fall widens σ and hides
    small spikes. With 6σ false alarms are rare for Gaussian values, but not for heavy-tailed ones.

    Args:
        window: number of previous steps that a step is compared with.
        threshold: standard deviations above the mean beyond which a value is a spike.
    """

    name = "loss_spikes"
    hook_points = frozenset({HookPoint.POST_BACKWARD})
    in_health = True
    needs_step_series = True
    _previous = Remembered(partial(torch.zeros, len(SIGNALS), 0, dtype=torch.float64))
    """The newest ``window`` values of each signal."""
    _counts = Remembered(partial(torch.zeros, len(SIGNALS), dtype=torch.int64))
    metrics = "".join(SPIKES.format(prefix=prefix, label=label) for prefix, label in SIGNALS.items())

    def __init__(self, *, window: int = 128, threshold: float = 6.0) -> None:
        require(window >= 2, f"loss_spikes.window is {window}; it must be at least 2, for a standard deviation.")
        require(0 < threshold < float("inf"), f"loss_spikes.threshold is {threshold}; it must be a positive number.")
        self.window, self.threshold = window, threshold

    def start(self, run: RunInfo) -> None:
        """Check that the run is longer than the window.

        Raises:
            UnsuitableError: if it is not.
        """
        if run.steps <= self.window:
            raise UnsuitableError(
                f"Hook 'loss_spikes' compares each step with the previous {self.window} steps, but the run has only "
                f"{run.steps} steps; choose a smaller window with {hook_option_text(self.name, window='N')}."
            )

    def compute(self, ctx: RunDataContext) -> Metrics:
        """Return the deviations of the step, and the counts; nothing before the window is full."""
        if ctx.loss is None or ctx.grad_norm is None:
            return {}
        grad_norm = ctx.grad_norm
        if ctx.loss_scale is not None:  # the scaler skips a step with an infinite norm
            grad_norm = torch.where(grad_norm.isfinite(), grad_norm, torch.nan)
        new = torch.stack([unsharded(torch.as_tensor(ctx.loss)).to(grad_norm), grad_norm])[:, None]
        series = torch.cat([self._previous.to(new.device), new], dim=1)
        self._previous = series[:, -self.window :].clone()
        if series.shape[1] <= self.window:
            return {}
        deviation = deviations(series, self.window)[:, -1]
        self._counts = self._counts.to(new.device) + (deviation > self.threshold)
        metrics: dict[str, Any] = {}
        for prefix, value, count in zip(SIGNALS, deviation, self._counts, strict=True):
            metrics |= {f"{prefix}_deviation": value, f"{prefix}_spike_count": count}
        return metrics

    def is_urgent(self, metrics: Metrics) -> bool | Tensor:
        """Return whether the step is a spike."""
        flags = [metrics[f"{prefix}_deviation"] > self.threshold for prefix in SIGNALS]
        return torch.stack(flags).any()

    def check(self, values: Mapping[str, Any], step: int) -> Iterator[Alert]:
        """Yield an alert for every signal that spikes at the step."""
        for prefix, label in SIGNALS.items():
            metric = f"{prefix}_deviation"
            if (deviation := values[metric]) > self.threshold:
                sentence = (
                    f"The {label} spiked at step {step:,}: it was {deviation:.1f} standard deviations above "
                    f"its mean over the previous {self.window} steps (the threshold is {self.threshold:g})."
                )
                yield Alert(sentence, metric=metric, step=step, value=deviation, limit=self.threshold)
