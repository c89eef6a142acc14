"""Unscaled views of gradients under a GradScaler, with the bits that the optimizer will use."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from ..training import TrainingTask


def _scale_of(scaler: GradScaler | None, optimizer: Optimizer) -> Tensor | None:
    """Return the current scale of the gradients, or ``None`` if they are not scaled."""
    # The scaler creates its private _scale only when it scales its first loss.
    if scaler is None or not scaler.is_enabled() or scaler._scale is None:
        return None
    # Private: torch has no public way to ask whether the loop has already called scaler.unscale_(optimizer).
    is_unscaled = scaler._per_optimizer_states[id(optimizer)]["stage"].name != "READY"
    return None if is_unscaled else scaler._scale


@contextmanager
def unscaled_gradients(task: TrainingTask, *, scales_back: bool) -> Iterator[bool]:
    """Replace scaled gradients by unscaled copies for the body; yield whether any gradient is not finite.

    If ``scales_back``, the copies, with the changes of hooks, are scaled and copied into the gradients after the body;
    otherwise they are dropped.
    """
    scale = _scale_of(task.scaler, task.optimizer)
    if scale is None:
        yield False
        return
    leaves = [leaf for group in task.optimizer.param_groups for leaf in group["params"] if leaf.grad is not None]
    scaled = [leaf.grad for leaf in leaves]
    copies = [gradient.clone() for gradient in scaled]
    # g ← g · (1 / scale), with the private kernel and the float64 reciprocal of GradScaler.unscale_, so that hooks see
    # the bits that the optimizer will use.
    inverse = scale.double().reciprocal().float()
    found_inf = torch.zeros((), device=scale.device)
    torch._amp_foreach_non_finite_check_and_unscale_(copies, found_inf, inverse)
    for leaf, gradient in zip(leaves, copies, strict=True):
        leaf.grad = gradient
    try:
        yield bool(found_inf)
        if scales_back:
            with torch.no_grad():
                for leaf, gradient in zip(leaves, scaled, strict=True):
                    # g ← g · scale: the scaler unscales these gradients again before the update.
                    gradient.copy_(leaf.grad * scale)
    finally:
        for leaf, gradient in zip(leaves, scaled, strict=True):
            leaf.grad = gradient
