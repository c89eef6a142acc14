"""Helpers that feed given gradients to a hook at POST_BACKWARD."""

from collections.abc import Iterable
from typing import Any

import torch
from loopscope.hooks import HookPoint, TrainingHook
from torch import Tensor, nn

from tests.training_hooks.epoch_end import epoch_end


def planted(size: int) -> nn.Module:
    """Return a model with one parameter of ``size`` elements."""
    return nn.Linear(size, 1, bias=False)


def feed(hook: TrainingHook, gradients: Iterable[Tensor], *, first: int = 1) -> dict[int, dict[str, Any]]:
    """Feed one gradient per step from step ``first`` on to a hook at its due steps; return its reports by step."""
    reports, model = {}, None
    for step, gradient in enumerate(gradients, start=first):
        if hook.step_schedule.is_due(step):
            model = model or planted(len(gradient))
            model.weight.grad = gradient.reshape(1, -1).to(model.weight.dtype).clone()
            metrics = hook.compute(epoch_end(model, hook_point=HookPoint.POST_BACKWARD, step=step))
            if metrics:
                reports[step] = {name: torch.as_tensor(value).item() for name, value in metrics.items()}
    return reports


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def cosine_error(cosine: float, dimensions: int) -> float:
    """Return the standard error (1 − c²)/√d of a cosine c between sketches of d dimensions, to first order in 1/√d.

    With unit vectors x, y the sketched cosine differs from c by the sum of s_i s_j M_ij over colliding pairs i ≠ j, M
    the symmetric part of x yᵀ − c/2·(x xᵀ + y yᵀ). Pairs collide with probability 1/d, so its variance is at most
    2‖M‖_F²/d = (1 − c²)²/d, as for the correlation of d Gaussian pairs. Vectors with one direction (c = ±1) keep it.

    >>> cosine_error(0.0, 16384)
    0.0078125
    """
    return float((1 - cosine * cosine) / dimensions**0.5)
