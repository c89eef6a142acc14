"""Critical sharpness: how far the training loss falls along a direction, from forward passes only."""

from collections.abc import Sequence

import torch
from loopscope.hooks import OptimizerGroup
from loopscope.state import Vector, copied, dot, minus, trainable
from torch import Tensor

from .measured_loss import MeasuredLoss
from .stability import critical_step


def gradient_metrics(loss: MeasuredLoss, preconditioner: Tensor | None, first: float, passes: int) -> dict[str, Tensor]:
    """Search for the critical step from the learning rate ``first`` along −g, and −P⁻¹g for a flat preconditioner P."""
    gradient = loss.gradient()
    found = {"critical_sharpness": 2 / critical_along(loss, loss.space.vector(-gradient), first, passes)}
    if preconditioner is not None:
        direction = loss.space.vector(-gradient / preconditioner)
        found["preconditioned_critical_sharpness"] = 2 / critical_along(loss, direction, first, passes)
    return found


def update_metrics(loss: MeasuredLoss, groups: Sequence[OptimizerGroup], passes: int) -> dict[str, Tensor]:
    """Search for the critical multiple of the step that the optimizer would now make from the loss's first batch."""
    batch, model_ctx = loss.batches[0], loss.model_ctx
    own = MeasuredLoss(model_ctx, [batch])
    live = trainable(model_ctx.model)
    start = copied(live)
    with model_ctx.branch():
        model_ctx.take_step(batch)
        update = minus(live, start)
    uphill = dot(model_ctx.compute_batch_gradients(batch), update) > 0
    multiple = torch.where(uphill, 0.0, critical_along(own, update, 1.0, passes))
    found = {"update_critical_ratio": 1 / multiple}
    rates = {group.lr for group in groups}
    if len(rates) == 1:
        rate = rates.pop()
        found |= {"update_critical_lr": multiple * rate, "update_critical_sharpness": 2 / (multiple * rate)}
    return found


def critical_along(loss: MeasuredLoss, direction: Vector, first: float, passes: int) -> Tensor:
    """Return the multiple of ``direction`` at which the loss is back where it was, see :func:`critical_step`."""
    with loss.along(direction) as rise:
        return critical_step(rise, torch.tensor(first, device=loss.model_ctx.device), passes)


CRITICAL_SHARPNESS = """
    critical_sharpness | 2/η_c, L(θ − η_c·g) = L(θ), g = ∇L(θ) | (0, ∞)
        | The curvature along the gradient as finite steps meet it; at most sharpness on a quadratic loss. NaN here and
        below: η_c is not within a factor of 4^critical_passes of the present learning rate.
    preconditioned_critical_sharpness | 2/η_c, L(θ − η_c·P⁻¹g) = L(θ) | (0, ∞)
        | The same along Adam's direction without momentum; at most preconditioned_sharpness on a quadratic loss.
    update_critical_ratio | 1/c, L(θ + c·Δθ) = L(θ), L the loss of the first batch, Δθ the step that the optimizer would
        now make from it, momentum and weight decay included | (0, ∞]
        | η/η_c. 1/2: the step leads to the minimum along its line; above 1: it raises the loss of the batch it is made
        from. Infinite: the step goes uphill from its start.
    update_critical_lr | η_c = c·η, η the present learning rate of all parameter groups (left out if they differ)
        | [0, ∞)
        | The learning rate above which the next step raises the loss of its batch.
    update_critical_sharpness | 2/η_c = 2/(c·η) | (0, ∞]
        | The critical sharpness of arXiv 2601.16979; rises with training until it hovers near 2/η, or above under
        momentum.
"""
"""What :func:`gradient_metrics` and :func:`update_metrics` return."""
