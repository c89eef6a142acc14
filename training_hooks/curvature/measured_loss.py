"""The training loss on a few of the run's batches: its derivatives, and critical steps along a direction."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, reduce

import torch
from loopscope.data import Batch
from loopscope.hooks import ModelDataContext, OptimizerGroup
from loopscope.tensors import Vector, axpy, copied, dot, minus, overwrite, trainable
from loopscope.training import Method
from torch import Tensor

from ..measures import FlatSpace
from .lanczos import Product

Rise = Callable[[Tensor], Tensor]
"""Maps the multiple of a direction to the rise of the loss; both are zero-dimensional tensors."""


@dataclass(frozen=True)
class BatchHessian:
    """The Hessian of the mean loss over one batch with ``rows`` rows; ``times`` multiplies a vector by it."""

    rows: int
    times: Callable[[Vector], Vector]


@dataclass(frozen=True)
class MeasuredLoss:
    """The mean training loss over the rows of ``batches``, in the current modes of the model.

    Each batch has a separate forward pass, with its own BatchNorm statistics, from the current state of the random
    streams. Unless torch's stream advances in between, a batch therefore has the same dropout mask in all measurements.
    """

    model_ctx: ModelDataContext
    batches: list[Batch]

    @cached_property
    def space(self) -> FlatSpace:
        """The space of flat vectors over the trained parameters."""
        return FlatSpace(trainable(self.model_ctx.model))

    @cached_property
    def rows(self) -> list[int]:
        """Number of rows of each batch, summed over ranks."""
        return [self.model_ctx.rows(batch) for batch in self.batches]

    def value(self) -> Tensor:
        """Return the loss, zero-dimensional."""
        return self._mean(self.model_ctx.compute_batch_loss)

    def gradient(self) -> Tensor:
        """Return the gradient, flat."""

        def flat_gradient(batch: Batch) -> Tensor:
            return self.space.flat(self.model_ctx.compute_batch_gradients(batch))

        return self._mean(flat_gradient)

    def hessians(self, method: Method, epsilon: float) -> list[BatchHessian]:
        """Return the Hessian of each batch; exact ones keep the graphs of all batches."""
        products = [self.model_ctx.hessian_operator(batch, method=method, epsilon=epsilon) for batch in self.batches]
        return [BatchHessian(*pair) for pair in zip(self.rows, products, strict=True)]

    def product(self, parts: Sequence[BatchHessian]) -> Product:
        """Return the product of the Hessian of the mean loss over the rows of ``parts`` with flat vectors."""
        total_rows = sum(part.rows for part in parts)

        def product(flat: Tensor) -> Tensor:
            # Hv = Σ_b (rows_b / rows)·H_b v, shape (n,)
            vector = self.space.vector(flat)
            terms = (self.space.flat(part.times(vector)).mul_(part.rows / total_rows) for part in parts)
            return reduce(Tensor.add_, terms)

        return product

    @contextmanager
    def along(self, direction: Vector) -> Iterator[Rise]:
        """Yield c ↦ L(θ + c·direction) − L(θ), which moves the parameters; restore them at the end."""
        live = trainable(self.model_ctx.model)
        start = copied(live)
        start_loss = self.value()

        def rise(step: Tensor) -> Tensor:
            overwrite(live, axpy(step, direction, start))
            return self.value() - start_loss

        try:
            yield rise
        finally:
            overwrite(live, start)

    def _mean(self, measure: Callable[[Batch], Tensor]) -> Tensor:
        pairs = zip(self.rows, self.batches, strict=True)
        return reduce(Tensor.add_, (measure(batch).mul_(rows / sum(self.rows)) for rows, batch in pairs))


def gradient_metrics(loss: MeasuredLoss, preconditioner: Tensor | None, first: float, passes: int) -> dict[str, Tensor]:
    """Search for the critical step from the learning rate ``first`` along −g, and −P⁻¹g for a flat preconditioner P."""
    downhill = -loss.gradient()
    flat = {"critical_sharpness": downhill}
    if preconditioner is not None:
        flat["preconditioned_critical_sharpness"] = downhill / preconditioner
    return {
        name: 2 / critical_multiple(loss, loss.space.vector(direction), first, passes)
        for name, direction in flat.items()
    }


def update_metrics(loss: MeasuredLoss, groups: Sequence[OptimizerGroup], passes: int) -> dict[str, Tensor]:
    """Search for the critical multiple of the step that the optimizer would now take on the first batch of ``loss``."""
    batch, model_ctx = loss.batches[0], loss.model_ctx
    batch_loss = MeasuredLoss(model_ctx, [batch])
    live = trainable(model_ctx.model)
    start = copied(live)
    with model_ctx.branch():
        model_ctx.take_step(batch)
        update = minus(live, start)
    # Uphill the loss rises at once: c = 0, and the ratio 1/c is infinite.
    uphill = dot(model_ctx.compute_batch_gradients(batch), update) > 0
    multiple = torch.where(uphill, 0.0, critical_multiple(batch_loss, update, 1.0, passes))
    metrics = {"update_critical_ratio": 1 / multiple}
    rates = {group.lr for group in groups}
    if len(rates) == 1 and not math.isnan(rate := rates.pop()):
        metrics |= {"update_critical_lr": multiple * rate, "update_critical_sharpness": 2 / (multiple * rate)}
    return metrics


def critical_multiple(loss: MeasuredLoss, direction: Vector, first: float, passes: int) -> Tensor:
    """Return the multiple of ``direction`` at which the loss returns to its start, as :func:`critical_step` does."""
    with loss.along(direction) as rise:
        return critical_step(rise, torch.tensor(first, device=loss.model_ctx.device), passes)


def critical_step(rise: Rise, first: Tensor, passes: int) -> Tensor:
    """Return the multiple c of a direction at which the loss returns to its start: ``rise`` ≤ 0 below c, > 0 above.

    The search starts at ``first``, positive and zero-dimensional. It divides the multiple by four while the loss rises,
    and multiplies it by four while it does not. When two multiples bracket c, it continues with their geometric mean.
    It evaluates ``rise`` ``passes`` times, without transferring values from the device. After b evaluations inside the
    bracket the uncertainty of c is a factor of 2^±(2^−b). The result is NaN without a bracket. A non-finite loss counts
    as a rise. If the loss returns to its start several times, c is one of these crossings.
    """
    below, above = torch.zeros_like(first), torch.full_like(first, math.inf)
    step = first
    for _ in range(passes):
        # Negated, so that a NaN counts as a rise
        rises = ~(rise(step) <= 0)
        below = torch.where(rises, below, step)
        above = torch.where(rises, step, above)
        # √below·√above, since the product below·above may leave the range of float32
        middle = below.sqrt() * above.sqrt()
        step = torch.where(below == 0, above / 4, torch.where(above.isinf(), below * 4, middle))
    return torch.where((below > 0) & above.isfinite(), below.sqrt() * above.sqrt(), math.nan)


CRITICAL_SHARPNESS = """
    critical_sharpness | 2/η_c, L(θ − η_c·g) = L(θ), g = ∇L(θ) | (0, ∞), NaN
        | The curvature along the gradient for finite steps; at most sharpness on a quadratic loss. NaN here and below:
        η_c is not within a factor of 4^critical_passes of the current learning rate.
    preconditioned_critical_sharpness | 2/η_c, L(θ − η_c·P⁻¹g) = L(θ) | (0, ∞), NaN
        | The same in Adam's direction without momentum; at most preconditioned_sharpness on a quadratic loss.
    update_critical_ratio | 1/c, L(θ + c·Δθ) = L(θ), L the loss of the first batch, Δθ the step that the optimizer would
        now take on it, with momentum and weight decay | (0, ∞], NaN
        | η/η_c. 1/2: the step leads to the minimum along its line; above 1: it raises the loss of its own batch.
        Infinite: the step goes uphill from the start.
    update_critical_lr | η_c = c·η, η the current learning rate of all parameter groups (missing if they differ)
        | [0, ∞), NaN | The learning rate above which the next step raises the loss of its batch.
    update_critical_sharpness | 2/η_c = 2/(c·η) | (0, ∞], NaN
        | The critical sharpness of arXiv 2601.16979; rises in training until it stays near 2/η, or higher with
        momentum.
"""
