"""Unscaled views of gradients under a GradScaler, with the bits that the optimizer will use."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from ..combined_optimizers import separate_optimizers
from ..hooks import StatePart
from .attached_loop import AttachedLoop


def _scale_of(scaler: GradScaler | None, optimizer: Optimizer) -> Tensor | None:
    """Return the current scale of the gradients, or ``None`` if they are not scaled."""
    # The scaler creates its private _scale only when it scales its first loss.
    if scaler is None or not scaler.is_enabled() or scaler._scale is None:
        return None
    # Private: torch has no public way to ask whether the loop has already called scaler.unscale_(optimizer).
    is_unscaled = scaler._per_optimizer_states[id(optimizer)]["stage"].name != "READY"
    return None if is_unscaled else scaler._scale


def _copy_of(gradient: Tensor) -> Tensor:
    """Return a copy of a gradient; a sparse float16 one is coalesced, as by the scaler, since its sums may overflow."""
    return gradient.coalesce().clone() if gradient.is_sparse and gradient.dtype is torch.float16 else gradient.clone()


@contextmanager
def unscaled_gradients(attached: AttachedLoop) -> Iterator[bool]:
    """Replace scaled gradients by unscaled copies for the body; yield whether every optimizer must skip its step.

    An optimizer must skip its step if one of its gradients is not finite. If a hook changes gradients, the copies are
    scaled and copied into the gradients after the body; otherwise they are dropped.
    """
    task = attached.driver.task
    optimizers = separate_optimizers(task.optimizer)
    scales = [_scale_of(task.scaler, optimizer) for optimizer in optimizers]
    leaves: list[Any] = []
    copies: list[Tensor] = []
    overflows: list[Tensor] = []
    for optimizer, scale in zip(optimizers, scales, strict=True):
        if scale is not None:
            present = [leaf for group in optimizer.param_groups for leaf in group["params"] if leaf.grad is not None]
            unscaled, overflow = _unscaled([leaf.grad for leaf in present], scale)
            leaves, copies, overflows = leaves + present, copies + unscaled, [*overflows, overflow]
    if not overflows:
        yield False
        return
    scaled = [leaf.grad for leaf in leaves]
    for leaf, gradient in zip(leaves, copies, strict=True):
        leaf.grad = gradient
    try:
        yield len(overflows) == len(optimizers) and all(map(bool, overflows))
        if any(StatePart.GRADIENTS.value in parts for parts in attached.treatments.values()):
            scale = next(scale for scale in scales if scale is not None)  # a scaler has one scale for all optimizers
            with torch.no_grad():
                for leaf, gradient in zip(leaves, scaled, strict=True):
                    # g ← g · scale: the scaler unscales these gradients again before the update.
                    gradient.copy_(leaf.grad * scale)
    finally:
        for leaf, gradient in zip(leaves, scaled, strict=True):
            leaf.grad = gradient


def _unscaled(gradients: list[Tensor], scale: Tensor) -> tuple[list[Tensor], Tensor]:
    """Return unscaled copies of gradients, and a tensor that is 1 if any of them is not finite, otherwise 0."""
    copies = [_copy_of(gradient) for gradient in gradients]
    # g ← g · (1 / scale), with the private kernel and the float64 reciprocal of GradScaler.unscale_, so that hooks see
    # the bits that the optimizer will use.
    found_inf = torch.zeros((), device=scale.device)
    values = [copy._values() if copy.is_sparse else copy for copy in copies]  # as in GradScaler.unscale_
    torch._amp_foreach_non_finite_check_and_unscale_(values, found_inf, scale.double().reciprocal().float())
    return copies, found_inf
