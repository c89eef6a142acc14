"""Stability of training: volatility and autocorrelation of the loss, gradient norm variation, update ratio."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from loopscope import HookPoint, HookRegistry, Remembered, RunDataContext, StepSchedule, TrainingHook
from loopscope.errors import UnsuitableError, UsageError, require
from loopscope.hooks import MetricInfo, Metrics, RunInfo, metric_table
from loopscope.tensors import Vector, laid_out_like, total_of, trainable
from torch import Tensor, nn

from ..measures import WeightCopy, stacked

AROUND_UPDATE = frozenset({HookPoint.PRE_UPDATE, HookPoint.POST_STEP})
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


def update_ratio(before: WeightCopy, after: Vector) -> Tensor:
    """Return ‖θ_after − θ_before‖₂ / (‖θ_before‖₂ + 1e-12) over the parameters in ``after``, zero-dimensional."""
    return total_of(before.change_norms(after)) / (total_of(before.norms(after)) + 1e-12)


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
GRADIENTS_AND_UPDATES = """
    grad_norm_mean | mean of ‖g‖₂ over the window, g all gradients of a step before any clipping, without the steps that
        a loss scaler skips | [0, ∞)
        | Compare with the clipping threshold: far above it, nearly every step is clipped.
    grad_norm_variation | population standard deviation of ‖g‖₂ / its mean, over the window | [0, √(n − 1)], NaN
        | The coefficient of variation. Above about 1: a few steps have most of the gradient. NaN: no gradient.
    update_ratio | ‖θ_after − θ_before‖₂ / (‖θ_before‖₂ + 1e-12) around optimizer.step(), all trainable parameters
        | [0, ∞) | Proportional to the learning rate. At its highest value about 1e-3 is usual for Adam and SGD, 1e-2
        for AdamW at the start, and more for steps of a fixed size, such as Muon's; it falls with a decay schedule.
        Above 1e-1 a step overwrites the weights.
    update_ratio_mean | mean of the newest ⌈window / update_every⌉ values of update_ratio | [0, ∞)
        | Smoother than update_ratio; the same reading applies.
    window_steps | n, the steps in the window | 2..window
        | Below `window` at the start of a run: the other values then come from fewer steps.
"""


@HookRegistry.register
class TrainingDiagnostics(TrainingHook):
    """Measure loss volatility and autocorrelation, the variation of the gradient norm, and the true update ratio.

    At POST_EPOCH (SNAPSHOT in the step loop) the hook summarises the losses and gradient norms of the last ``window``
    steps, across epochs. If there are fewer steps, it uses those and reports their number as ``window_steps``. The
    gradient norm is that at POST_BACKWARD, before clipping. The update ratio compares the weights before and after
    ``optimizer.step()``, so it includes weight decay.

    Assumes that loss and gradient norm fluctuate around a steady level within a window. A trend adds to the volatility
    and pulls the autocorrelation towards 1; it hardly affects the volatility of changes.

    Args:
        window: number of steps in the summary of loss and gradient norm.
        lags: largest lag of the autocorrelation; a lag is reported once the window has 4 values per lag.
        update_every: steps between two measurements of the update ratio, each of which copies the parameters for one
            update; hooks that measure the same update share the copy.
    """

    name = "training_diagnostics"
    loop_points = {"epoch": AROUND_UPDATE | {HookPoint.POST_EPOCH}, "step": AROUND_UPDATE | {HookPoint.SNAPSHOT}}
    needs_step_series = True
    _steps = Remembered(partial(torch.zeros, 2, 0, dtype=torch.float64))
    """Losses and gradient norms of the window, shape (2, n)."""
    _ratios = Remembered(list[Tensor])
    _copy = Remembered[WeightCopy | None](None, saved=False)
    """The weights before the optimizer's step, between PRE_UPDATE and POST_STEP."""
    _copied = Remembered(dict[str, nn.Parameter], saved=False)
    _loaded = Remembered(dict[str, Tensor], saved=False)
    """The same weights right after loading, until the parameters determine their layout and device."""

    def __init__(self, *, window: int = 100, lags: int = 5, update_every: int = 20) -> None:
        require(
            window >= 2, f"training_diagnostics.window is {window}; it must be at least 2, for a standard deviation."
        )
        if not 0 <= lags <= window // VALUES_PER_LAG:
            raise UsageError(
                f"training_diagnostics.lags is {lags}; it must be in 0..{window // VALUES_PER_LAG}: an autocorrelation "
                "needs a window of at least 4 values per lag."
            )
        require(update_every >= 1, f"training_diagnostics.update_every is {update_every}; it must be at least 1.")
        self.window, self.lags = window, lags
        self._most_ratios = -(-window // update_every)
        self._updates = StepSchedule(mode="stride", every_n_steps=update_every)
        self.point_schedules = dict.fromkeys(AROUND_UPDATE, self._updates)

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
        """Return the update ratio at POST_STEP, and all other metrics between steps."""
        if ctx.hook_point is HookPoint.PRE_UPDATE:
            self._copy, self._copied, self._loaded = WeightCopy.of(ctx.model), trainable(ctx.model), {}
            return {}
        if ctx.hook_point is HookPoint.POST_STEP:
            return self._measure_update(trainable(ctx.model))
        if ctx.step_losses is not None and ctx.step_grad_norms is not None:
            norms = ctx.step_grad_norms
            if ctx.skipped_steps:  # a loss scaler skips steps with an infinite norm, which then have none
                norms = torch.where(norms.isfinite(), norms, torch.nan)
            new = torch.stack([ctx.step_losses, norms])
            self._steps = torch.cat([self._steps.to(new.device), new], dim=1)[:, -self.window :]
        # With skipped steps NaN stands for such a step.
        return self._summarise(torch.nanmean if ctx.skipped_steps else torch.mean)

    def _measure_update(self, parameters: dict[str, nn.Parameter]) -> Metrics:
        copy, self._copy, self._copied = self._copy, None, {}
        if self._loaded:
            on_device = {name: value.to(parameters[name].device) for name, value in self._loaded.items()}
            copy = WeightCopy({name: laid_out_like(value, parameters[name]) for name, value in on_device.items()})
            self._loaded = {}
        after = {name: value for name, value in parameters.items() if copy is not None and name in copy}
        if copy is None or not after:
            return {}
        ratio = update_ratio(copy, after)
        self._ratios = [*self._ratios, ratio][-self._most_ratios :]
        return {"update_ratio": ratio}

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
        if self._ratios:
            metrics["update_ratio_mean"] = stacked(self._ratios).mean()
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """Return the losses, norms and ratios of the window, and within an update the weights before it."""
        before = self._loaded if self._copy is None else self._copy.named(self._copied)
        return super().state_dict() | {"before": dict(before)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that :meth:`state_dict` returned; older checkpoints may lack ``before``."""
        super().load_state_dict(state)
        self._copy, self._copied, self._loaded = None, {}, dict(state.get("before", {}))

    def describe_metrics(self) -> Sequence[MetricInfo]:
        """Describe the metrics, with one autocorrelation for each lag."""
        lags = [AUTOCORRELATION.format(lag=lag) for lag in range(1, self.lags + 1)]
        return metric_table("".join([LOSS, *lags, GRADIENTS_AND_UPDATES]))
