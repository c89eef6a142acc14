"""How much curvature an optimizer bears: stability thresholds, Adam's preconditioner, the critical step."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from loopscope.hooks import OptimizerGroup
from torch import Tensor
from torch.optim import SGD, Adam, Optimizer

Rise = Callable[[Tensor], Tensor]
"""How much the loss rises over a step of that multiple of a direction; zero-dimensional tensors."""


def stability_threshold(optimizer_class: type[Optimizer], groups: Sequence[OptimizerGroup]) -> float | None:
    """Return the curvature above which full-batch training on a quadratic loss diverges, or ``None`` if unknown.

    Gradient descent: 2/η. SGD with momentum μ and dampening τ: (2+2μ)/((1−τ)η), with Nesterov momentum
    (2+2μ)/((1+2μ)η) (Cohen et al., arXiv 2103.00065). Adam, for the Hessian preconditioned by √v̂ + ε, which is taken as
    constant: (2+2β₁)/((1−β₁)η), 38/η at β₁ = 0.9 (arXiv 2207.14484). Unknown for other optimizers, for parameter
    groups that differ in these numbers, and at η = 0.
    """
    known = issubclass(optimizer_class, (SGD, Adam))
    thresholds = {_threshold_of(group, adam=issubclass(optimizer_class, Adam)) for group in groups} if known else set()
    found = thresholds.pop() if len(thresholds) == 1 else math.inf
    return found if math.isfinite(found) else None


def _threshold_of(group: OptimizerGroup, *, adam: bool) -> float:
    if group.lr == 0:
        return math.inf
    if adam:
        beta = float(group.options["betas"][0])
        return (2 + 2 * beta) / ((1 - beta) * group.lr)
    momentum, dampening = float(group.options["momentum"]), float(group.options["dampening"])
    if momentum == 0:
        return 2 / group.lr
    passed_on = 1 + 2 * momentum if group.options["nesterov"] else 1 - dampening
    return (2 + 2 * momentum) / (passed_on * group.lr)


def adam_preconditioner(states: Mapping[str, Mapping[str, Any]], groups: Sequence[OptimizerGroup]) -> dict[str, Tensor]:
    """Return P = √v̂ + ε with v̂ = v/(1 − β₂ᵗ) by parameter name, for the parameters that have been stepped.

    With amsgrad v is the running maximum of the second moments.
    """
    found: dict[str, Tensor] = {}
    for group in groups:
        beta = float(group.options["betas"][1])
        for name in group.names:
            if name in states:
                state = states[name]
                moment = state["max_exp_avg_sq" if group.options["amsgrad"] else "exp_avg_sq"]
                steps = torch.as_tensor(state["step"], dtype=torch.float64)
                wide = moment.to(torch.promote_types(moment.dtype, torch.float32))
                found[name] = (wide / (1 - beta**steps)).sqrt() + group.options["eps"]
    return found


def critical_step(rise: Rise, first: Tensor, passes: int) -> Tensor:
    """Return the multiple c of a direction at which the loss is back where it began: ``rise`` ≤ 0 below, > 0 above.

    From ``first`` on, positive and zero-dimensional, the multiple is quartered while the loss rises, or taken four
    times while it does not; once c lies between two multiples, their geometric mean is tried. ``passes`` evaluations
    in all, without a look at the device's values. After b of them within the bracket c is known to a factor of
    2^±(2^−b). NaN if no bracket is found. A loss that is not finite counts as a rise. If the loss crosses its first
    value more than once, c is one of the crossings.
    """
    below, above = torch.zeros_like(first), torch.full_like(first, math.inf)
    step = first
    for _ in range(passes):
        rises = ~(rise(step) <= 0)
        below = torch.where(rises, below, step)
        above = torch.where(rises, step, above)
        middle = below.sqrt() * above.sqrt()
        step = torch.where(below == 0, above / 4, torch.where(above.isinf(), below * 4, middle))
    return torch.where((below > 0) & above.isfinite(), below.sqrt() * above.sqrt(), math.nan)
