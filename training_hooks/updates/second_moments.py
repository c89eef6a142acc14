"""Second moments of the gradient in the states of optimizers, as the optimizers divide by them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from loopscope.hooks import OptimizerGroup
from loopscope.tensors import is_sharded, laid_out_like, local_shards, unsharded
from torch import Tensor

WITHOUT_MOMENTS = tuple(
    getattr(torch.optim, name)
    for name in ("SGD", "Adagrad", "Adamax", "ASGD", "LBFGS", "Muon", "Rprop", "SparseAdam")
    if hasattr(torch.optim, name)
)
"""Optimizers of torch that average no squared gradients; SparseAdam averages those of present rows only."""
COUPLED = (torch.optim.Adam, torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop, torch.optim.Adadelta)
"""Optimizers that add weight decay to the gradient before they average it, unless it is decoupled."""
ROTATED = frozenset({"GG", "Q", "projector", "ortho_matrix"})
"""Keys of states whose moments are those of a rotated or projected gradient (SOAP, GaLore)."""


def step_of(state: Mapping[str, Any], group: OptimizerGroup) -> Any:
    """Return the number of steps that a parameter has made, from its state or its group; ``None`` if unknown."""
    step = state.get("step", group.options.get("step", group.options.get("k")))  # k: schedule-free optimizers
    return unsharded(step) if isinstance(step, Tensor) else step


def coupled_decay(group: OptimizerGroup) -> float:
    """Return λ if the optimizer averages the squares of g + λθ instead of those of g, otherwise 0."""
    is_coupled = issubclass(group.optimizer_class, COUPLED) and not group.options.get("decoupled_weight_decay", False)
    return group.weight_decay if is_coupled else 0.0


def square_of_epsilon(group: OptimizerGroup, dtype: torch.dtype) -> float:
    """Return the value below which the optimizer's ε, rather than v̂, determines the step; 0 if there is none."""
    epsilon = group.options.get("eps", 0.0)
    if issubclass(group.optimizer_class, torch.optim.Adadelta):
        return float(epsilon)  # √(v̂ + ε)
    if issubclass(group.optimizer_class, torch.optim.Adafactor):
        first = epsilon[0]  # v̂ is at least ε₁²
        return float(torch.finfo(dtype).eps if first is None else first) ** 2
    return float(epsilon) ** 2 if isinstance(epsilon, (int, float, Tensor)) else 0.0


@dataclass(frozen=True)
class SecondMoment:
    """The second moment v of a parameter after a step, and its bias correction."""

    stored: Tensor
    """v in float32 or wider; of a sharded parameter this rank's shard."""
    correction: float | Tensor = 1.0
    """c with v̂ = v/c, the value by which the optimizer divides."""


@torch.no_grad()
def second_moment(state: Mapping[str, Any], group: OptimizerGroup, parameter: Tensor) -> SecondMoment | None:
    """Return the second moment of a parameter after a step.

    Supports the states of Adam and its relatives (``exp_avg_sq``; with amsgrad the running maximum
    ``max_exp_avg_sq``), RMSprop and Adadelta (``square_avg``, centred or not), and factored moments of Adafactor in
    torch and in transformers.

    Args:
        state: the state of the parameter.
        group: the settings of its group at the step.
        parameter: the parameter, which may be sharded.

    Returns:
        The moment; ``None`` for an optimizer without such a state, or with moments of a rotated gradient.
    """
    if ROTATED & state.keys():
        return None
    if (factored := _factored(state, parameter)) is not None:
        return SecondMoment(factored)
    key = "max_exp_avg_sq" if group.options.get("amsgrad") and "max_exp_avg_sq" in state else "exp_avg_sq"
    moment = state.get(key, state.get("square_avg", state.get("variance")))
    if not _fits(moment, parameter):
        return None
    moment = _local(moment, parameter)
    if group.options.get("centered") and "grad_avg" in state:
        return SecondMoment(moment - _local(state["grad_avg"], parameter).square())
    is_corrected = group.options.get("bias_correction", group.options.get("correct_bias", True))
    if key not in state or group.betas is None or len(group.betas) < 2 or not is_corrected:
        return SecondMoment(moment)
    if (step := step_of(state, group)) is None:
        return None
    # v̂ = v / (1 − β₂ᵗ); the number of a step on the CPU is read at no cost, one on a device stays there
    if isinstance(step, Tensor) and step.device.type != "cpu":
        return SecondMoment(moment, (1 - group.betas[1] ** step.double()).to(moment))
    return SecondMoment(moment, 1 - group.betas[1] ** float(step))


def _fits(moment: Any, parameter: Tensor) -> bool:
    return isinstance(moment, Tensor) and moment.shape == parameter.shape and moment.is_floating_point()


def _local(moment: Tensor, parameter: Tensor) -> Tensor:
    """Return this rank's part of a moment, in the layout of its parameter, in float32 or wider."""
    moment = laid_out_like(moment, parameter) if is_sharded(parameter) else unsharded(moment)
    (part,) = local_shards([moment])
    return part.to(torch.promote_types(part.dtype, torch.float32))


def _factored(state: Mapping[str, Any], parameter: Tensor) -> Tensor | None:
    """Return v = r·cᵀ / mean(r) from the means r of the rows and c of the columns (arXiv 1804.04235, algorithm 4)."""
    if "row_var" in state and "col_var" in state:  # torch: shapes (…, rows, 1) and (…, 1, columns)
        rows, columns = (unsharded(state[key]) for key in ("row_var", "col_var"))
    elif "exp_avg_sq_row" in state and "exp_avg_sq_col" in state:  # transformers: (…, rows) and (…, columns)
        rows = unsharded(state["exp_avg_sq_row"]).unsqueeze(-1)
        columns = unsharded(state["exp_avg_sq_col"]).unsqueeze(-2)
    else:
        return None
    shape = torch.broadcast_shapes(rows.shape, columns.shape)  # type: ignore[no-untyped-call]
    if shape != parameter.shape:
        return None
    rows, columns = (part.to(torch.promote_types(part.dtype, torch.float32)) for part in (rows, columns))
    # The mean first, since the product of two small numbers may underflow. Rows of zeros give zero, not 0/0.
    means = rows.mean(dim=-2, keepdim=True).clamp(min=torch.finfo(rows.dtype).tiny)
    return _local(rows / means * columns, parameter)
