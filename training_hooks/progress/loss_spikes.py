"""Spikes of the loss and of the gradient norm relative to the preceding steps."""

import math
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from loopscope import HookPoint, HookRegistry, Remembered, RunDataContext, TrainingHook
from loopscope.errors import UnsuitableError, require
from loopscope.hooks import Alert, Metrics, RunInfo
from loopscope.option_words import hook_option_text
from loopscope.tensors import is_readable, unsharded
from torch import Tensor

SMALLEST_SPREAD = 1e-10  # below this standard deviation a step has no deviation
CHUNK = 1024  # steps whose windows are in memory at once
SIGNALS = {"loss": "loss", "grad_norm": "gradient norm"}
"""The watched signals: the prefix of the metrics, and the name in sentences."""
IDS = {"loss": "loss-spike", "grad_norm": "gradient-jump"}
"""The id of the doctor's finding about each signal."""
MATERIAL = 0.5
"""Rise of the loss above which a spike matters: by half of its mean, and by a tenth of its initial level. A spike of a
tiny loss is many standard deviations high, and means nothing."""
RECOVERED = 0.25
"""Rise of the loss below which it has recovered from a spike."""
HUGE = 100.0
"""Rise of the loss that is a warning at once: 100 times its mean, and 20 times its initial level and every loss of the
window. Losses of data with heavy tails rise by less: by 54 with two degrees of freedom, in 300 steps."""


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
RISE = """
    loss_rise | (x − m) / (|m| + M / 5), x the loss, m its mean over the `window` steps before, M the largest of their
        absolute values and |ℓ|, ℓ the mean over the first `window` steps; infinite and NaN values are ignored | (−∞, ∞)
        | Above 0.5 after a spike, and still above 0.25 `window` / 8 steps after it: the spike is a warning. Above 100
        at a spike: it is a warning at once.
"""
"""The height of a spike relative to the level of the loss."""


@HookRegistry.register
class LossSpikes(TrainingHook):
    """Count spikes of the loss and of the gradient norm, and report each of them.

    A spike is a value above the mean of the previous ``window`` steps by more than ``threshold`` standard deviations.
    Spikes enter the window like other values, so only the start of a lasting rise is a spike; infinite and NaN values
    in the window are ignored. Loss and gradient norm are those at POST_BACKWARD, before clipping, which would hide
    spikes. The hook checks every step with a known loss, and reports a spike at once. A step that a loss scaler skips
    has no gradient norm: its overflow is no spike.

    A spike is reported with severity ``info``, since trainings that succeed have spikes, too. It is a warning if the
    loss rises by more than half of its mean plus a tenth of the largest loss of the window or the start, and does not
    fall below half of that rise within window / 8 steps. A rise 200 times as large is a warning at once.

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
    _initial = Remembered(partial(torch.zeros, 0, dtype=torch.float64))
    """The mean loss of the first window: no element until it is full, then one."""
    _spike_step = Remembered(int)
    """The step of a spike from which the loss may not have recovered, or 0."""
    _peak = Remembered(float)
    """The largest rise since that step."""
    metrics = "".join(SPIKES.format(prefix=prefix, label=label) for prefix, label in SIGNALS.items()) + RISE

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
        loss, grad_norm = unsharded(torch.as_tensor(ctx.loss)), ctx.grad_norm
        if ctx.loss_scale is not None:  # the scaler skips a step with an infinite norm
            grad_norm = torch.where(grad_norm.isfinite(), grad_norm, torch.nan)
        on_host = is_readable(loss) and is_readable(grad_norm)
        if on_host:
            new = np.array([[loss.item()], [grad_norm.item()]])
            series = torch.from_numpy(np.concatenate([self._previous.cpu().numpy(), new], axis=1))
        else:
            column = torch.stack([loss.to(grad_norm), grad_norm])[:, None]
            series = torch.cat([self._previous.to(column.device), column], dim=1)
        self._previous = series[:, -self.window :]
        if series.shape[1] <= self.window:
            return {}
        measured = self._measured_on_host(series) if on_host else None
        if measured is not None:
            return measured
        deviation = deviations(series, self.window)[:, -1]
        self._counts = self._counts.to(series.device) + (deviation > self.threshold)
        return _named(self._rise(series[0]), deviation, self._counts)

    def _measured_on_host(self, series: Tensor) -> dict[str, Any] | None:
        """Return the metrics of the last column as numbers, or ``None`` unless all statistics of the others are finite.

        The numbers are those of :func:`deviations` and :meth:`_rise`, after 9 operations on tensors instead of 50, in a
        third of the time.
        """
        preceding = series[:, :-1]
        means = preceding.sum(-1, keepdim=True).div_(self.window)
        spreads = (preceding - means).square_().sum(-1).div_(self.window).sqrt_()
        pairs = [(mean, spread) for (mean,), spread in zip(means.tolist(), spreads.tolist(), strict=True)]
        if not all([math.isfinite(number) for pair in pairs for number in pair]):
            return None
        if not len(self._initial):
            self._initial = means[0]
        mean, (least, most) = pairs[0][0], preceding[0].aminmax()
        unit = abs(mean) + max(-least.item(), most.item(), abs(self._initial.item())) / 5
        if not unit:
            return None
        values = series[:, -1].tolist()
        deviation = [
            (value - center) / spread if spread >= SMALLEST_SPREAD else math.nan
            for value, (center, spread) in zip(values, pairs, strict=True)
        ]
        if any([number > self.threshold for number in deviation]):
            self._counts = self._counts.cpu() + (torch.tensor(deviation) > self.threshold)
        return _named((values[0] - mean) / unit, deviation, self._counts.tolist())

    def _rise(self, losses: Tensor) -> Tensor:
        """Return the rise of the last of ``window`` + 1 losses above the mean of the others."""
        preceding = torch.where(losses[:-1].isfinite(), losses[:-1], 0.0)
        mean = preceding.sum() / losses[:-1].isfinite().sum()
        if not len(self._initial):
            self._initial = mean[None]
        level = torch.maximum(preceding.abs().max(), self._initial.to(mean.device)[0].abs())
        return (losses[-1] - mean) / (mean.abs() + level / 5)

    def is_urgent(self, metrics: Metrics) -> bool | Tensor:
        """Return whether the step is a spike."""
        loss, grad_norm = [metrics[f"{prefix}_deviation"] > self.threshold for prefix in SIGNALS]
        is_spike: bool | Tensor = loss | grad_norm
        return is_spike

    def check(self, values: Mapping[str, Any], step: int) -> Iterator[Alert]:
        """Yield an alert for every signal that spikes at the step, and for a loss that stays high after one."""
        rise = values["loss_rise"]
        yield from self._lasting_spike(rise, step)
        for prefix, label in SIGNALS.items():
            metric = f"{prefix}_deviation"
            deviation = values[metric]
            if not deviation > self.threshold:
                continue
            sentence = (
                f"The {label} spiked at step {step:,}: it was {deviation:.1f} standard deviations above "
                f"its mean over the previous {self._window_text} (the threshold is {self.threshold:g})."
            )
            is_huge = prefix == "loss" and rise > HUGE
            yield Alert(
                sentence,
                metric=metric,
                step=step,
                value=deviation,
                limit=self.threshold,
                severity="warning" if is_huge else "info",
                id=IDS[prefix],
            )
            if prefix == "loss" and not is_huge and not self._spike_step:
                self._spike_step, self._peak = step, rise

    @property
    def _spacing(self) -> int:
        """The steps between two values, of which a schedule leaves out others."""
        return self.step_schedule.every_n_steps

    @property
    def _window_text(self) -> str:
        every = self._spacing
        return f"{self.window} steps" + (f" that were measured, one in {every:,}" if every > 1 else "")

    def _lasting_spike(self, rise: float, step: int) -> Iterator[Alert]:
        """Yield a warning if the loss is still high ``window`` / 8 steps after a spike that matters."""
        if not self._spike_step:
            return
        self._peak = max(self._peak, rise)
        patience, steps_since = max(1, self.window // 8) * self._spacing, step - self._spike_step
        # A steep rise may start with a small spike, so the first steps say nothing about a recovery.
        has_recovered = steps_since > patience // 2 and not rise > RECOVERED
        if steps_since >= patience and self._peak > MATERIAL and not has_recovered:
            sentence = (
                f"The loss has not recovered from its spike at step {self._spike_step:,}: {steps_since} steps later "
                f"its rise is {rise:.2g} (the limit is {RECOVERED:g})."
            )
            yield Alert(
                sentence, metric="loss_rise", step=self._spike_step, value=rise, limit=RECOVERED, id=IDS["loss"]
            )
        if steps_since >= patience or has_recovered:
            self._spike_step = 0


def _named(rise: Any, deviation: Any, counts: Any) -> dict[str, Any]:
    """Return the metrics of a step by name, from its rise and a deviation and a count for each signal."""
    metrics = {"loss_rise": rise}
    for prefix, value, count in zip(SIGNALS, deviation, counts, strict=True):
        metrics |= {f"{prefix}_deviation": value, f"{prefix}_spike_count": count}
    return metrics
