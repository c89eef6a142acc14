"""A learning-rate range test from the current state, rolled back afterwards."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, islice

import torch
from loopscope import HookPoint, HookRegistry, InterventionHook, Remembered, RunDataContext
from loopscope.data import Batch, Loader, MicroBatches, SeparateBatches
from loopscope.errors import UsageError, require
from loopscope.hooks import Metrics, ModelDataContext, RunInfo
from torch import Tensor

from ..measures import refuse_missing_rates


def growing_rates(lowest: float, highest: float, steps: int) -> list[float]:
    """Return ``steps`` learning rates from ``lowest`` to ``highest`` in a geometric progression.

    >>> growing_rates(0.01, 1.0, 3)
    [0.01, 0.1, 1.0]
    """
    return [lowest * (highest / lowest) ** (step / (steps - 1)) for step in range(steps)]


def exponential_mean(values: Tensor, decay: float) -> Tensor:
    """Return s_i = Σ_{j≤i} β^(i−j)·v_j / Σ_{j≤i} β^(i−j) for the values v, shape (n,), with β = ``decay``.

    A non-finite value does not change earlier means. For a straight line the mean lags by β/(1 − β) steps.

    >>> exponential_mean(torch.tensor([4.0, 1.0]), 0.5).tolist()
    [4.0, 2.0]
    """
    total, weight, means = torch.zeros_like(values[0]), 0.0, []
    for value in values:
        total, weight = decay * total + value, decay * weight + 1
        means.append(total / weight)
    return torch.stack(means)


def range_metrics(rates: Tensor, losses: Tensor, *, skip: int, divergence: float) -> dict[str, Tensor]:
    """Evaluate a range test: smoothed ``losses`` at learning ``rates``, both of shape (n,), without the first ``skip``.

    A result is NaN if the loss never falls, is never finite, or never diverges.
    """
    rates, losses = rates[skip:], losses[skip:]
    finite = losses.isfinite()
    finite_losses = torch.where(finite, losses, math.inf)
    lowest = finite_losses.argmin()
    # ds/d ln η by central differences, shape (n − skip,)
    slopes = torch.gradient(losses, spacing=(rates.log(),))[0]
    falls = (torch.arange(len(rates), device=rates.device) < lowest) & (slopes < 0)
    steepest = torch.where(falls, slopes, 0.0).argmin()
    best = finite_losses.cummin(dim=0).values
    # b + (divergence − 1)·|b| is divergence·b for b > 0, and above b also for a negative loss.
    exceeds = ~finite | (finite_losses > best + (divergence - 1) * best.abs())
    # take(), since indexing by a tensor of one number reads it on the host
    return {
        "suggested_lr": torch.where(falls.any(), rates.take(steepest), math.nan),
        "min_loss_lr": torch.where(finite.any(), rates.take(lowest), math.nan),
        "min_loss": torch.where(finite.any(), finite_losses.take(lowest), math.nan),
        "divergence_lr": torch.where(exceeds.any(), rates.take(exceeds.int().argmax()), math.nan),
    }


def parts_in(batch: Batch) -> int:
    """Return the number of micro-batches in the batch of a step, 0 if it is a single batch."""
    return len(batch) if isinstance(batch, MicroBatches) else 0


def coming_batches(loader: Loader, step: int, parts: int = 0) -> Iterator[Batch]:
    """Yield the batches of a run after ``step`` steps, over all following epochs without end.

    In a loop whose steps have several micro-batches, ``parts`` of the loader's batches are one batch.
    """
    first, start = divmod(step, len(loader))
    batches = (batch for epoch in count(first) for batch in loader.batches(epoch, start if epoch == first else 0))
    return iter(lambda: SeparateBatches(islice(batches, parts)), None) if parts else batches


@HookRegistry.register
@dataclass(kw_only=True, eq=False)
class LrProbe(InterventionHook):
    """Test a range of learning rates: train with a growing learning rate, record the losses, and roll back.

    This is the range test of Smith (arXiv 1506.01186) with exponential growth: from the current training state it takes
    ``steps`` steps on the next batches, with a learning rate that grows from ``lr_min`` to ``lr_max``. If parameter
    groups have different learning rates, the largest grows in this way, and the others keep their ratio to it. The loss
    of a step is the training loss before its update, smoothed over the steps. The smoothed loss lags by
    smoothing/(1 − smoothing) steps, and its first 1/(1 − smoothing) steps, rounded up, are ignored. Schedulers do not
    advance, and commits of other hooks (clipping) are disabled.

    The test is rolled back, so it does not change the run; it costs ``steps`` training steps.

    Assumes comparable losses of successive batches: in a sorted order a change of data looks like an effect of the
    learning rate.

    Args:
        divergence: multiple of the smallest smoothed loss so far that counts as divergence.
        every: measure at the first SNAPSHOT, then at every ``every``-th.
        lr_max: the last learning rate.
        lr_min: the first learning rate.
        smoothing: weight of earlier steps in the smoothed loss, from 0 (none) to below 1.
        steps: number of training steps.
    """

    name = "lr_probe"
    hook_points = frozenset({HookPoint.SNAPSHOT})
    needs_loss = True
    needs_loader = True
    _snapshots = Remembered(int)
    metrics = """
        suggested_lr | η at which ds/d ln η, by central differences, is smallest and negative, before min_loss_lr
            | [lr_min, lr_max], NaN
            | The learning rate at which the loss falls fastest; a good initial value. NaN: the loss never falls.
        min_loss_lr | η at which s is smallest | [lr_min, lr_max]
            | Too high for training; a tenth of it is a common choice. Compare it with the run's learning rate.
        min_loss | the smallest s | (−∞, ∞) | The lowest smoothed loss in the test.
        divergence_lr | the first η at which s > b + (divergence − 1)·|b|, b the smallest s so far, or s is not finite
            | [lr_min, lr_max], NaN
            | The learning rate at which training diverges. NaN: it does not diverge in the range. A slight rise of a
            loss near 0 also counts as divergence.
        rates | η_i = lr_min·(lr_max/lr_min)^(i/(steps − 1)), i = 0..steps − 1 | (0, ∞)
            | The tested learning rates.
        losses | L_i, the training loss of step i before its update | (−∞, ∞)
            | The raw curve with one value per learning rate; NaN or infinite after the weights have overflowed.
        smoothed_losses | s_i = Σ_{j≤i} β^(i−j)·L_j / Σ_{j≤i} β^(i−j), β = smoothing | (−∞, ∞)
            | The curve to plot over the logarithm of rates.
    """

    divergence: float = 4.0
    every: int = 1
    lr_max: float = 1.0
    lr_min: float = 1e-6
    smoothing: float = 0.8
    steps: int = 50

    def __post_init__(self) -> None:
        lr_min, lr_max, smoothing, steps = self.lr_min, self.lr_max, self.smoothing, self.steps
        sentence = f"lr_probe.lr_min is {lr_min} and lr_probe.lr_max is {lr_max}; they must be positive and ascending."
        require(0 < lr_min < lr_max < math.inf, sentence)
        require(0 <= smoothing < 1, f"lr_probe.smoothing is {smoothing}; it must be at least 0 and below 1.")
        self._skip = math.ceil(round(1 / (1 - smoothing), 6))  # in floating point, 1 / (1 − 0.8) is slightly above 5
        if steps < self._skip + 3:
            raise UsageError(
                f"lr_probe.steps is {steps}; with lr_probe.smoothing = {smoothing} it must be at least "
                f"{self._skip + 3}, of which the first {self._skip} are ignored."
            )
        require(self.divergence > 1, f"lr_probe.divergence is {self.divergence}; it must be above 1.")
        require(self.every >= 1, f"lr_probe.every is {self.every}; it must be at least 1.")
        self.rates = growing_rates(lr_min, lr_max, steps)

    def start(self, run: RunInfo) -> None:
        """Raise :class:`UnsuitableError` if a parameter group has no learning rate that the test could replace."""
        refuse_missing_rates(self.name, "replaces", run.optimizer_groups)

    def intervene(self, run_ctx: RunDataContext, model_ctx: ModelDataContext) -> Metrics:
        """Run the test at every ``every``-th snapshot."""
        self._snapshots += 1
        if (self._snapshots - 1) % self.every:
            return {}
        group_rates = [group.lr for group in run_ctx.optimizer_groups]
        largest = max(group_rates)
        ratios = [rate / largest if largest else 1.0 for rate in group_rates]
        pairs = zip(self.rates, coming_batches(model_ctx.loader, run_ctx.step), strict=False)
        step_losses = [
            model_ctx.take_step(batch, learning_rates=[rate * ratio for ratio in ratios]) for rate, batch in pairs
        ]
        losses = torch.stack(step_losses)
        means = exponential_mean(losses.to(torch.promote_types(losses.dtype, torch.float32)), self.smoothing)
        rates = torch.tensor(self.rates, device=means.device)
        metrics = range_metrics(rates, means, skip=self._skip, divergence=self.divergence)
        return {**metrics, "rates": self.rates, "losses": list(losses), "smoothed_losses": list(means)}
