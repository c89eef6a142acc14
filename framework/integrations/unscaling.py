"""Gradients that a GradScaler has scaled, as hooks see them: unscaled, with the bits that the optimizer will use."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from ..training import TrainingTask


def _scale_of(scaler: GradScaler | None, optimizer: Optimizer) -> Tensor | None:
    """Return what the gradients are scaled by now; ``None`` where they are not."""
    if scaler is None or not scaler.is_enabled() or scaler._scale is None:
        return None
    # no public name tells whether the loop has unscaled the gradients itself
    is_unscaled = scaler._per_optimizer_states[id(optimizer)]["stage"].name != "READY"
    return None if is_unscaled else scaler._scale


@contextmanager
def unscaled(task: TrainingTask, *, keeps: bool) -> Iterator[bool]:
    """Put unscaled copies in the place of gradients that are scaled, for the body; yield whether one is not finite.

    What a hook commits to the gradients is scaled and kept where ``keeps``, anything else of the copies is dropped.
    """
    scale = _scale_of(task.scaler, task.optimizer)
    if scale is None:
        yield False
        return
    leaves = [leaf for group in task.optimizer.param_groups for leaf in group["params"] if leaf.grad is not None]
    scaled = [leaf.grad for leaf in leaves]
    copies = [gradient.clone() for gradient in scaled]
    # As the scaler itself does it, so that hooks see the bits that the optimizer will use.
    inverse = scale.double().reciprocal().float()
    found = torch.zeros((), device=scale.device)
    torch._amp_foreach_non_finite_check_and_unscale_(copies, found, inverse)
    for leaf, gradient in zip(leaves, copies, strict=True):
        leaf.grad = gradient
    try:
        yield bool(found)
        if keeps:
            with torch.no_grad():
                for leaf, gradient in zip(leaves, scaled, strict=True):
                    gradient.copy_(leaf.grad * scale)
    finally:
        for leaf, gradient in zip(leaves, scaled, strict=True):
            leaf.grad = gradient
