"""Stability thresholds of optimizers, Adam's preconditioner, and a check for exact Hessian-vector products."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from loopscope.errors import UnsuitableError
from loopscope.hooks import OptimizerGroup
from loopscope.state.parameter_groups import number_or
from loopscope.tensors import fully_sharded_modules, is_sharded
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

from ..measures import stacked


def stability_threshold(
    optimizer_class: type[Optimizer], groups: Sequence[OptimizerGroup], steps: float = math.inf
) -> float | None:
    """Return the curvature above which full-batch training on a quadratic loss diverges, or ``None`` if unknown.

    Gradient descent: 2/η. SGD with momentum μ and dampening τ: (2+2μ)/((1−τ)η), with Nesterov momentum
    (2+2μ)/((1+2μ)η) (Cohen et al., arXiv 2103.00065); weight decay λ adds to the curvature, and is subtracted from each
    of these. Adam, for the Hessian preconditioned by √v̂ + ε, which is taken as constant: (1−β₁ᵗ)·(2+2β₁)/((1−β₁)η)
    after t ``steps``, in the limit 38/η at β₁ = 0.9 (arXiv 2207.14484; their P contains the first factor). Adam's
    weight decay is ignored. Unknown for other optimizers, for parameter groups with different settings, at η = 0, and
    if weight decay alone diverges.
    """
    if not issubclass(optimizer_class, (SGD, Adam)):
        return None
    thresholds = {_threshold_of(group, steps, adam=issubclass(optimizer_class, Adam)) for group in groups}
    threshold = thresholds.pop() if len(thresholds) == 1 else math.inf
    return threshold if 0 < threshold < math.inf else None


def _threshold_of(group: OptimizerGroup, steps: float, *, adam: bool) -> float:
    if group.lr == 0 or math.isnan(group.lr):
        return math.inf
    if adam:
        beta = group.betas[0] if group.betas else math.nan
        return (1 - math.pow(beta, steps)) * (2 + 2 * beta) / ((1 - beta) * group.lr)
    momentum, dampening = (number_or(group.options.get(name), 0.0) for name in ("momentum", "dampening"))
    if momentum == 0:
        return 2 / group.lr - group.weight_decay
    factor = 1 + 2 * momentum if group.options.get("nesterov") else 1 - dampening
    return (2 + 2 * momentum) / (factor * group.lr) - group.weight_decay


def steps_taken(states: Mapping[str, Mapping[str, Any]]) -> float:
    """Return t of Adam's bias correction: the largest step count of any parameter, 0 before the first step."""
    counts = [torch.as_tensor(state["step"]) for state in states.values() if "step" in state]
    return float(stacked(counts).max()) if counts else 0.0


def adam_preconditioner(states: Mapping[str, Mapping[str, Any]], groups: Sequence[OptimizerGroup]) -> dict[str, Tensor]:
    """Return P = √v̂ + ε with v̂ = v/(1 − β₂ᵗ) by parameter name, for the parameters that have been stepped.

    With amsgrad v is the running maximum of the second moments.
    """
    preconditioner: dict[str, Tensor] = {}
    for group in groups:
        if group.betas is None:
            continue
        beta = group.betas[1]
        for name in group.names:
            if state := states.get(name):
                moment = state["max_exp_avg_sq" if group.options.get("amsgrad") else "exp_avg_sq"]
                steps = torch.as_tensor(state["step"], dtype=torch.float64)
                wide = moment.to(torch.promote_types(moment.dtype, torch.float32))
                preconditioner[name] = (wide / (1 - beta**steps)).sqrt() + number_or(group.options.get("eps"), 0.0)
    return preconditioner


def refuse_exact_on_shards(hook: str, model: nn.Module) -> None:
    """Raise :class:`UnsuitableError` if parameters are sharded, since torch cannot differentiate twice through shards.

    Under FSDP2 torch reports the shards as unused. Under tensor parallelism it omits the contributions through the
    collectives of the first backward pass, so that only the products of the first sharded layers would be correct.
    """
    if any(map(is_sharded, model.parameters())):
        kind = "modules under fully_shard" if fully_sharded_modules(model) else "layers under tensor parallelism"
        raise UnsuitableError(
            f"Hook {hook!r} needs exact Hessian-vector products, for which torch cannot differentiate through shards, "
            f"and the model has {kind}; set {hook}.method=finite_difference."
        )
