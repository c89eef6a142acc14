"""Spikes of the loss and of the gradient norm against the steps before them."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from framework.contexts import MetricInfo, RunDataContext, RunInfo
from framework.errors import UnsuitableError, UsageError
from framework.hook_points import HookPoint
from framework.hooks import TrainingHook
from framework.metrics import Metrics
from framework.registry import HookRegistry
from training_hooks.step_window import StepWindow, column

SMALLEST_SPREAD = 1e-10
SIGNALS = {"loss": "loss", "grad_norm": "gradient norm"}
"""What is watched: the prefix of its metrics, and its name in a sentence."""
METRICS = [f"{prefix}_{metric}" for metric in ("deviation", "spike_count") for prefix in SIGNALS]


def deviations(values: Tensor, previous: Tensor) -> tuple[Tensor, Tensor]:
    """Return (value − mean) / σ and the mean, mean and σ those of each signal's previous values; shape (signals,) each.

    ``previous`` has shape (signals, window); σ is its population standard deviation. The deviation is NaN where
    σ < 1e-10, so that no comparison with a threshold holds there.
    """
    variance, mean = torch.var_mean(previous, dim=1, correction=0)
    spread = variance.sqrt_()
    spread.masked_fill_(spread < SMALLEST_SPREAD, torch.nan)
    return (values - mean) / spread, mean


def or_mean(values: Tensor, mean: Tensor) -> Tensor:
    """Return the values, those that are infinite or NaN replaced by the mean."""
    return torch.where(values.abs() < torch.inf, values, mean)


@HookRegistry.register
class LossSpikes(TrainingHook):
    """Count spikes of the loss and of the gradient norm, and warn of each by its step.

    A spike is a value above the mean of the previous ``window`` steps by more than ``threshold`` standard deviations.
    A spike enters the window like any other value, so that a lasting rise is a spike at its beginning only. A value
    that is infinite or NaN enters as the window's mean, since it would hide all spikes for a window's length. Loss and
    gradient are those of POST_BACKWARD: before any clipping, which would hide what this hook looks for. The warning
    comes when the values reach the host: at the end of the epoch, in the step loop with the next flush.

    Assumes that loss and gradient norm scatter about a level that is steady over a window: a steep fall widens σ and
    hides small spikes. With 6σ false alarms are rare for Gaussian values; for heavy-tailed ones they are not.

    Args:
        window: how many steps before the present one it is compared with.
        threshold: standard deviations above the mean from which on a value is a spike.
    """

    name = "loss_spikes"
    hook_points = frozenset({HookPoint.POST_BACKWARD})
    _counts: Tensor

    def __init__(self, *, window: int = 128, threshold: float = 6.0) -> None:
        if window < 2:
            raise UsageError(f"loss_spikes.window is {window}; a standard deviation needs at least 2 steps.")
        if not 0 < threshold < float("inf"):
            raise UsageError(f"loss_spikes.threshold is {threshold}; it must be a positive number.")
        self.window = window
        self.threshold = threshold
        self.reset()

    def start(self, run: RunInfo) -> None:
        """Refuse a run that ends before the window is full."""
        if run.steps <= self.window:
            raise UnsuitableError(
                f"Hook 'loss_spikes' compares each step with the {self.window} before it, and the run has "
                f"{run.steps} steps; choose a smaller window with --hook-config loss_spikes.window=N."
            )

    def compute(self, ctx: RunDataContext) -> Metrics:
        """Return this step's deviations and the counts of spikes; nothing while the window is not full."""
        values = column(ctx.loss, ctx.grad_norm())
        if not self._previous.count:
            self._previous.push(values)
            return {}
        sizes, mean = deviations(values, self._previous.unordered.to(values.device))
        was_full = self._previous.is_full
        self._previous.push(or_mean(values, mean))
        if not was_full:
            return {}
        self._counts = self._counts.to(values.device) + (sizes > self.threshold)
        return dict(zip(METRICS, torch.cat([sizes, self._counts]).unbind(), strict=True))

    def check(self, values: Mapping[str, Any], step: int) -> None:
        """Warn of the spikes of a step."""
        for prefix, label in SIGNALS.items():
            if values[f"{prefix}_deviation"] > self.threshold:
                warnings.warn(
                    f"The {label} spiked at step {step}: it was {values[f'{prefix}_deviation']:.1f} standard "
                    f"deviations above its mean over the {self.window} steps before (the threshold is "
                    f"{self.threshold:g}).",
                    stacklevel=2,
                )

    def reset(self) -> None:
        """Forget the window and the counts."""
        self._previous = StepWindow(len(SIGNALS), self.window)
        self._counts = torch.zeros(len(SIGNALS), dtype=torch.float64)

    def state_dict(self) -> dict[str, Any]:
        """Return the window and the counts."""
        return {"previous": self._previous.state_dict(), "counts": self._counts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the window and the counts of :meth:`state_dict`."""
        self._previous.load_state_dict(state["previous"])
        self._counts = state["counts"]

    def describe_metrics(self) -> Sequence[MetricInfo]:
        """Describe the metrics of the loss and of the gradient norm."""
        return [info for prefix, label in SIGNALS.items() for info in _infos(prefix, label)]


def _infos(prefix: str, label: str) -> list[MetricInfo]:
    """Describe the metrics of one signal x; mean and σ are those of its previous ``window`` values."""
    return [
        MetricInfo(
            f"{prefix}_deviation",
            f"(x − mean) / σ; x the {label} of the step, mean and population standard deviation σ those of the "
            "`window` steps before it",
            "(−∞, ∞)",
            "Above `threshold`: a spike. Not reported before the window is full; NaN: σ < 1e-10, or x is NaN.",
        ),
        MetricInfo(
            f"{prefix}_spike_count",
            "number of steps so far with x > mean + threshold·σ and σ ≥ 1e-10",
            "0, 1, 2, …",
            "Rising early and then no more: the warm-up is too short. Rising to the end: the learning rate is too high "
            "or single batches are bad.",
        ),
    ]
