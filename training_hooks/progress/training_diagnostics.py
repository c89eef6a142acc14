"""How steadily training runs: scatter and memory of the loss, scatter of the gradient norm, size of the updates."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from loopscope import HookPoint, HookRegistry, Remembered, RunDataContext, StepSchedule, TrainingHook
from loopscope.errors import UnsuitableError, UsageError, require
from loopscope.hooks import MetricInfo, Metrics, RunInfo, metric_table
from loopscope.state import Vector, accumulate, norm, trainable
from torch import Tensor

from ..measures import stacked

AROUND_UPDATE = frozenset({HookPoint.PRE_UPDATE, HookPoint.POST_STEP})
VALUES_PER_LAG = 4


def spread(series: Tensor) -> Tensor:
    """Return the population standard deviation of a series, exactly zero if all values are equal."""
    return (series - series[:1]).std(correction=0)


def autocorrelation(series: Tensor, lag: int) -> Tensor:
    """Return Σ_t (x_t − x̄)(x_{t+lag} − x̄) / Σ_t (x_t − x̄)²; NaN if all values are equal.

    The biased estimate of Box and Jenkins (Time Series Analysis, 2.1.5), both sums divided by the same n.

    >>> import torch
    >>> autocorrelation(torch.tensor([1.0, -1.0, 1.0, -1.0]), 1)
    tensor(-0.7500)
    """
    shifted = series - series[:1]  # equal values then give exact zeros, not the rounding of their mean
    centred = shifted - shifted.mean()
    products: Tensor = (centred[lag:] * centred[: len(series) - lag]).sum()
    return products / centred.square().sum()


def update_ratio(before: dict[str, Tensor], after: Vector) -> Tensor:
    """Return ‖θ_after − θ_before‖₂ / (‖θ_before‖₂ + 1e-12), zero-dimensional; writes the difference to ``before``."""
    size = norm(before)
    return norm(accumulate(before, after, -1)) / (size + 1e-12)


LOSS = """
    loss_volatility | population standard deviation of the step losses L in the window | [0, ∞)
        | Scatter between batches plus any trend; rising while the loss stays: training becomes unstable.
    loss_change_volatility | population standard deviation of L_{t+1} − L_t in the window | [0, ∞)
        | About √2 times loss_volatility: batches scatter independently. Far below it: the loss moves slowly, by a
        trend. Above it: the loss alternates.
"""
AUTOCORRELATION = """
    loss_autocorrelation_lag_{lag} | Σ_t (L_t − L̄)(L_{{t+{lag}}} − L̄) / Σ_t (L_t − L̄)² over the window | [−1, 1]
        | Within ±2/√n: no memory. Positive: a trend or slow waves. Negative at lag 1: steps overshoot and come back.
        NaN: all losses are equal.
"""
GRADIENTS_AND_UPDATES = """
    grad_norm_mean | mean of ‖g‖₂ over the window, g all gradients of a step before any clipping | [0, ∞)
        | Its trend shows whether a clipping threshold fits; far above it nearly every step is clipped.
    grad_norm_variation | population standard deviation of ‖g‖₂ / its mean, over the window | [0, √(n − 1)]
        | The coefficient of variation. Above about 1 a few steps have most of the gradient. NaN: no gradient.
    update_ratio | ‖θ_after − θ_before‖₂ / (‖θ_before‖₂ + 1e-12) around optimizer.step(), all trainable parameters
        | [0, ∞) | About 1e-3 is healthy, 1e-2 normal for AdamW at the start; above 1e-1 a step overwrites the weights.
    update_ratio_mean | mean of the newest ⌈window / update_every⌉ values of update_ratio | [0, ∞)
        | The same over the window.
    window_steps | n, the steps in the window | 2..window
        | Below `window` in the beginning: the other values then rest on fewer steps.
"""


@HookRegistry.register
class TrainingDiagnostics(TrainingHook):
    """Measure loss volatility and autocorrelation, the variation of the gradient norm, and the true update ratio.

    Losses and gradient norms of all steps are reduced over the last ``window`` steps, across epochs, at
    POST_EPOCH, in the step loop at SNAPSHOT; a window that is not full is reduced as far as it goes, and
    ``window_steps`` says how far. The gradient norm is that of POST_BACKWARD, before any clipping. The update ratio is
    measured from the weights before and after ``optimizer.step()``, weight decay included.

    Assumes that loss and gradient norm scatter about a level that is steady over a window. A trend adds to the
    volatility and pulls the autocorrelation towards 1; the volatility of changes hardly sees it.

    Args:
        window: steps over which loss and gradient norm are reduced.
        lags: report the autocorrelation at the lags 1 to this; each once the window holds 4 values per lag.
        update_every: measure the update ratio at one step in so many, which copies the parameters for that step.
    """

    name = "training_diagnostics"
    loop_points = {"epoch": AROUND_UPDATE | {HookPoint.POST_EPOCH}, "step": AROUND_UPDATE | {HookPoint.SNAPSHOT}}
    needs_step_series = True
    _steps = Remembered(lambda: torch.zeros(2, 0, dtype=torch.float64))
    """Losses and gradient norms of the window, shape (2, n)."""
    _ratios = Remembered(list[Tensor])
    _before = Remembered(dict[str, Tensor])
    """The weights before the optimizer's step, between PRE_UPDATE and POST_STEP."""

    def __init__(self, *, window: int = 100, lags: int = 5, update_every: int = 20) -> None:
        require(window >= 2, f"training_diagnostics.window is {window}; a standard deviation needs at least 2 steps.")
        if not 0 <= lags <= window // VALUES_PER_LAG:
            raise UsageError(
                f"training_diagnostics.lags is {lags}; it must lie in 0..{window // VALUES_PER_LAG}, a quarter of the "
                "window: fewer values say nothing about a correlation."
            )
        require(update_every >= 1, f"training_diagnostics.update_every is {update_every}; it must be at least 1.")
        self.window, self.lags = window, lags
        self._most_ratios = -(-window // update_every)
        self._updates = StepSchedule(mode="stride", every_n_steps=update_every)
        self.point_schedules = dict.fromkeys(AROUND_UPDATE, self._updates)

    def start(self, run: RunInfo) -> None:
        """Refuse a run of one step."""
        if run.steps < 2:
            raise UnsuitableError(
                f"Hook 'training_diagnostics' measures how steps differ, and the run has {run.steps} of them; at least "
                "2 are needed."
            )

    def compute(self, ctx: RunDataContext) -> Metrics:
        """Return the update ratio at POST_STEP, and the rest where no step is under way."""
        if ctx.hook_point is HookPoint.PRE_UPDATE:
            self._before = accumulate(None, trainable(ctx.model))
            return {}
        if ctx.hook_point is HookPoint.POST_STEP:
            return self._updated(trainable(ctx.model))
        if ctx.step_losses is not None and ctx.step_grad_norms is not None:
            new = torch.stack([ctx.step_losses, ctx.step_grad_norms])
            self._steps = torch.cat([self._steps.to(new.device), new], dim=1)[:, -self.window :]
        return self._reduced()

    def _updated(self, after: Vector) -> Metrics:
        if not self._before:
            return {}
        ratio = update_ratio({name: value.to(after[name].device) for name, value in self._before.items()}, after)
        self._before = {}
        self._ratios = [*self._ratios, ratio][-self._most_ratios :]
        return {"update_ratio": ratio}

    def _reduced(self) -> Metrics:
        metrics: dict[str, Any] = {}
        losses, norms = self._steps
        if len(losses) > 1:
            metrics["window_steps"] = len(losses)
            metrics["loss_volatility"] = spread(losses)
            metrics["grad_norm_mean"] = norms.mean()
            metrics["grad_norm_variation"] = spread(norms) / norms.mean()
        if len(losses) > 2:
            metrics["loss_change_volatility"] = spread(losses.diff())
        for lag in range(1, min(self.lags, len(losses) // VALUES_PER_LAG) + 1):
            metrics[f"loss_autocorrelation_lag_{lag}"] = autocorrelation(losses, lag)
        if self._ratios:
            metrics["update_ratio_mean"] = stacked(self._ratios).mean()
        return metrics

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from :meth:`state_dict`, which used to leave out the weights where there were none."""
        super().load_state_dict({"before": {}, **state})

    def describe_metrics(self) -> Sequence[MetricInfo]:
        """Describe the metrics; L and ‖g‖ are the n losses and gradient norms in the window."""
        lags = [AUTOCORRELATION.format(lag=lag) for lag in range(1, self.lags + 1)]
        return metric_table("".join([LOSS, *lags, GRADIENTS_AND_UPDATES]))
