"""Spikes of the loss and of the gradient norm against the steps before them."""

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from loopscope import HookPoint, HookRegistry, Remembered, RunDataContext, TrainingHook
from loopscope.errors import UnsuitableError, require
from loopscope.hooks import Alert, Metrics, RunInfo
from torch import Tensor

SMALLEST_SPREAD = 1e-10
TOGETHER = 1024  # steps whose windows are laid out in memory at once
SIGNALS = {"loss": "loss", "grad_norm": "gradient norm"}
"""What is watched: the prefix of its metrics, and its name in a sentence."""


def deviations(series: Tensor, window: int) -> Tensor:
    """Return (x − mean) / σ of every value that has ``window`` values before it, mean and σ theirs.

    ``series`` has shape (signals, n), the result (signals, max(0, n − window)). σ is the population standard deviation
    of those that are finite: an infinity or NaN would hide all spikes for a window's length. The deviation is NaN where
    σ < 1e-10, so that no comparison with a threshold holds there.

    >>> deviations(torch.tensor([[1.0, 3.0, 5.0, 3.0]]), 2)
    tensor([[ 3., -1.]])
    """
    if series.shape[1] <= window:
        return series[:, :0]
    parts = []
    for begin in range(0, series.shape[1] - window, TOGETHER):
        part = series[:, begin : begin + window + TOGETHER]
        before, values = part.unfold(1, window, 1)[:, :-1], part[:, window:]
        finite = before.isfinite()
        count = finite.sum(-1)
        mean = torch.where(finite, before, 0.0).sum(-1) / count
        scatter = torch.where(finite, before - mean[..., None], 0.0).square().sum(-1)
        spread = (scatter / count).sqrt()
        parts.append((values - mean) / torch.where(spread < SMALLEST_SPREAD, torch.nan, spread))
    return torch.cat(parts, dim=1)


SPIKES = """
    {prefix}_deviation | (x − mean) / σ for each step of the epoch (step loop: since the last SNAPSHOT), the last being
        that of `step`; x the {label}, mean and population standard deviation σ those of the `window` steps before it
        | (−∞, ∞) each
        | Above `threshold`: a spike. The first `window` steps of a run have none; NaN: σ < 1e-10, or x is NaN.
    {prefix}_spike_count | number of steps so far with x > mean + threshold·σ and σ ≥ 1e-10 | 0, 1, 2, …
        | Rising early and then no more: the warm-up is too short. Rising to the end: the learning rate is too high or
        single batches are bad.
"""
"""What is told of one signal x; mean and σ are those of its previous ``window`` values."""


@HookRegistry.register
class LossSpikes(TrainingHook):
    """Count spikes of the loss and of the gradient norm, and warn of them by their steps.

    A spike is a value above the mean of the previous ``window`` steps by more than ``threshold`` standard deviations.
    A spike enters the window like any other value, so that a lasting rise is a spike at its beginning only; a value
    that is infinite or NaN does not. Loss and gradient norm are those of POST_BACKWARD: before any clipping, which
    would hide what this hook looks for. Every step is judged, all of an epoch together at its end, in the step loop at
    SNAPSHOT.

    Assumes that loss and gradient norm scatter about a level that is steady over a window: a steep fall widens σ and
    hides small spikes. With 6σ false alarms are rare for Gaussian values; for heavy-tailed ones they are not.

    Args:
        window: how many steps before the present one it is compared with.
        threshold: standard deviations above the mean from which on a value is a spike.
    """

    name = "loss_spikes"
    loop_points = {"epoch": frozenset({HookPoint.POST_EPOCH}), "step": frozenset({HookPoint.SNAPSHOT})}
    needs_step_series = True
    _previous = Remembered(lambda: torch.zeros(len(SIGNALS), 0, dtype=torch.float64))
    """The newest ``window`` values of each signal."""
    _counts = Remembered(lambda: torch.zeros(len(SIGNALS), dtype=torch.int64))
    metrics = "".join(SPIKES.format(prefix=prefix, label=label) for prefix, label in SIGNALS.items())

    def __init__(self, *, window: int = 128, threshold: float = 6.0) -> None:
        require(window >= 2, f"loss_spikes.window is {window}; a standard deviation needs at least 2 steps.")
        require(0 < threshold < float("inf"), f"loss_spikes.threshold is {threshold}; it must be a positive number.")
        self.window, self.threshold = window, threshold

    def start(self, run: RunInfo) -> None:
        """Refuse a run that ends before the window is full."""
        if run.steps <= self.window:
            raise UnsuitableError(
                f"Hook 'loss_spikes' compares each step with the {self.window} before it, and the run has "
                f"{run.steps} steps; choose a smaller window with --hook-config loss_spikes.window=N."
            )

    def compute(self, ctx: RunDataContext) -> Metrics:
        """Return the deviations of the steps since the last call and the counts; nothing before a window was full."""
        if ctx.step_losses is None or ctx.step_grad_norms is None or not len(ctx.step_losses):
            return {}
        new = torch.stack([ctx.step_losses, ctx.step_grad_norms])
        series = torch.cat([self._previous.to(new.device), new], dim=1)
        self._previous = series[:, -self.window :].clone()
        sizes = deviations(series, self.window)
        if not sizes.shape[1]:
            return {}
        self._counts = self._counts.to(new.device) + (sizes > self.threshold).sum(1)
        metrics: dict[str, Any] = {}
        for prefix, deviation, count in zip(SIGNALS, sizes, self._counts, strict=True):
            metrics |= {f"{prefix}_deviation": list(deviation), f"{prefix}_spike_count": count}
        return metrics

    def check(self, values: Mapping[str, Any], step: int) -> None:
        """Warn of every spike by its step; ``step`` is the last of those judged."""
        for prefix, label in SIGNALS.items():
            metric = f"{prefix}_deviation"
            sizes = values[metric]
            for at, size in enumerate(sizes, step - len(sizes) + 1):
                if size > self.threshold:
                    sentence = (
                        f"The {label} spiked at step {at:,}: it was {size:.1f} standard deviations above its mean over "
                        f"the {self.window} steps before (the threshold is {self.threshold:g})."
                    )
                    alert = Alert(sentence, metric=metric, step=at, value=size, limit=self.threshold)
                    warnings.warn(alert, stacklevel=2)
