"""Stability of training: volatility and autocorrelation of the loss, and variation of the gradient norm."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from loopscope import HookPoint, HookRegistry, Remembered, RunDataContext, TrainingHook
from loopscope.errors import UnsuitableError, UsageError, require
from loopscope.hooks import MetricInfo, Metrics, RunInfo, metric_table
from torch import Tensor

VALUES_PER_LAG = 4  # losses that the window must have for each lag of the autocorrelation


def spread(series: Tensor) -> Tensor:
    """Return the population standard deviation of a series, exactly zero if all values are equal."""
    # The standard deviation does not change with a shift; equal values become zeros before their mean is rounded.
    return (series - series[:1]).std(correction=0)


def autocorrelation(series: Tensor, lag: int) -> Tensor:
    """Return Σ_t (x_t − x̄)(x_{t+lag} − x̄) / Σ_t (x_t − x̄)²; NaN if all values are equal.

    This is the biased estimate of Box and Jenkins (Time Series Analysis, 2.1.5), which divides both sums by the same n.

    >>> import torch
    >>> autocorrelation(torch.tensor([1.0, -1.0, 1.0, -1.0]), 1)
    tensor(-0.7500)
    """
    shifted = series - series[:1]  # so that equal values give exact zeros and not the rounding error of their mean
    centred = shifted - shifted.mean()
    products: Tensor = (centred[lag:] * centred[: len(series) - lag]).sum()
    return products / centred.square().sum()


LOSS = """
    loss_volatility | population standard deviation of the step losses L in the window | [0, ∞)
        | Scatter between batches plus any trend. Rising at a constant loss: training becomes unstable.
    loss_change_volatility | population standard deviation of L_{t+1} − L_t in the window | [0, ∞)
        | About √2 times loss_volatility: batches scatter independently. Far below that: the loss follows a slow trend.
        Above that: the loss alternates.
"""
AUTOCORRELATION = """
    loss_autocorrelation_lag_{lag} | Σ_t (L_t − L̄)(L_{{t+{lag}}} − L̄) / Σ_t (L_t − L̄)² over the window | [−1, 1], NaN
        | Within ±2/√n: no memory. Positive: a trend or slow waves. Negative at lag 1: steps overshoot and return. NaN:
        all losses are equal.
"""
GRADIENTS = """
    grad_norm_mean | mean of ‖g‖₂ over the window, g all gradients of a step before any clipping, without the steps that
        a loss scaler skips | [0, ∞)
        | Compare with the clipping threshold: far above it, nearly every step is clipped.
    grad_norm_variation | population standard deviation of ‖g‖₂ / its mean, over the window | [0, √(n − 1)], NaN
        | The coefficient of variation. Above about 1: a few steps have most of the gradient. NaN: no gradient.
    window_steps | n, the steps in the window | 2..window
        | Below `window` at the start of a run: the other values then come from fewer steps.
"""


@HookRegistry.register
class TrainingDiagnostics(TrainingHook):
    """Measure volatility and autocorrelation of the loss, and the variation of the gradient norm.

    At POST_EPOCH (SNAPSHOT in the step loop) the hook summarises the losses and gradient norms of the last ``window``
    steps, across epochs. If there are fewer steps, it uses those and reports their number as ``window_steps``. The
    gradient norm is that at POST_BACKWARD, before clipping.

    Assumes that loss and gradient norm fluctuate around a steady level within a window. A trend adds to the volatility
    and pulls the autocorrelation towards 1; it hardly affects the volatility of changes.

    Args:
        window: number of steps in the summary of loss and gradient norm.
        lags: largest lag of the autocorrelation; a lag is reported once the window has 4 values per lag.
    """

    name = "training_diagnostics"
    loop_points = {"epoch": frozenset({HookPoint.POST_EPOCH}), "step": frozenset({HookPoint.SNAPSHOT})}
    needs_step_series = True
    _steps = Remembered(partial(torch.zeros, 2, 0, dtype=torch.float64))
    """Losses and gradient norms of the window, shape (2, n)."""

    def __init__(self, *, window: int = 100, lags: int = 5) -> None:
        require(
            window >= 2, f"training_diagnostics.window is {window}; it must be at least 2, for a standard deviation."
        )
        if not 0 <= lags <= window // VALUES_PER_LAG:
            raise UsageError(
                f"training_diagnostics.lags is {lags}; it must be in 0..{window // VALUES_PER_LAG}: an autocorrelation "
                "needs a window of at least 4 values per lag."
            )
        self.window, self.lags = window, lags

    def start(self, run: RunInfo) -> None:
        """Check that the run has at least two steps.

        Raises:
            UnsuitableError: if it has fewer.
        """
        if run.steps < 2:
            raise UnsuitableError(
                f"Hook 'training_diagnostics' compares steps and needs at least 2, but the run has {run.steps}; train "
                "for more steps."
            )

    def compute(self, ctx: RunDataContext) -> Metrics:
        """Add the steps since the last report to the window, and return its metrics."""
        if ctx.step_losses is not None and ctx.step_grad_norms is not None:
            norms = ctx.step_grad_norms
            if ctx.skipped_steps:  # a loss scaler skips steps with an infinite norm, which then have none
                norms = torch.where(norms.isfinite(), norms, torch.nan)
            new = torch.stack([ctx.step_losses, norms])
            self._steps = torch.cat([self._steps.to(new.device), new], dim=1)[:, -self.window :]
        # With skipped steps NaN stands for such a step.
        return self._summarise(torch.nanmean if ctx.skipped_steps else torch.mean)

    def _summarise(self, mean_of: Callable[[Tensor], Tensor]) -> Metrics:
        metrics: dict[str, Any] = {}
        losses, norms = self._steps
        if len(losses) > 1:
            metrics["window_steps"] = len(losses)
            metrics["loss_volatility"] = spread(losses)
            metrics["grad_norm_mean"] = mean_of(norms)
            shifted = norms - norms.nan_to_num(0.0).amax()  # exact zeros for equal norms
            metrics["grad_norm_variation"] = mean_of((shifted - mean_of(shifted)).square()).sqrt() / mean_of(norms)
        if len(losses) > 2:
            metrics["loss_change_volatility"] = spread(losses.diff())
        for lag in range(1, min(self.lags, len(losses) // VALUES_PER_LAG) + 1):
            metrics[f"loss_autocorrelation_lag_{lag}"] = autocorrelation(losses, lag)
        return metrics

    def describe_metrics(self) -> Sequence[MetricInfo]:
        """Describe the metrics, with one autocorrelation for each lag."""
        lags = [AUTOCORRELATION.format(lag=lag) for lag in range(1, self.lags + 1)]
        return metric_table("".join([LOSS, *lags, GRADIENTS]))
