"""Facts about losses that compare two distributions of classes, such as the divergence from a teacher's."""

import itertools
import math
from typing import Any

import torch
from torch import Tensor

from .autograd_nodes import VIEWS, saved_integer, saved_value

MOST_ELEMENTS = 2**16
"""Targets of which statistics are computed."""
LEAST_ROWS = 64
"""Rows of which they are computed at least, of many classes."""
LEAST_SPREAD = 1e-9
"""Spread of targets from which on that of outputs is compared with it."""
REDUCTIONS = frozenset({"Mean", "Sum", "Div"})
"""Nodes between the loss and the terms of a divergence, besides factors that are numbers."""


def information(probabilities: Tensor) -> float:
    """Return the mutual information of rows and predictions in nats, H(mean p) − mean H(p): shape (rows, classes)."""

    def entropies(shares: Tensor) -> Tensor:
        plogp: Tensor = torch.special.xlogy(shares, shares).sum(-1)
        return -plogp

    return float(entropies(probabilities.mean(0)) - entropies(probabilities).mean())


def variation(of_outputs: float, of_targets: float) -> dict[str, float]:
    """Return how much outputs differ between the rows, relative to the targets; nothing if these hardly differ."""
    is_known = of_targets > LEAST_SPREAD and math.isfinite(of_outputs)
    return {"output_variation": max(of_outputs, 0.0) / of_targets} if is_known else {}


def divergence_facts(nodes: list[Any], names: list[str]) -> dict[str, Any]:
    """Return facts about outputs and targets of a Kullback-Leibler divergence on the CPU.

    With targets t and outputs q, shape (rows, classes), term_loss is mean Σ t·ln(t/q), and constant_loss that of the
    best constant q, the mean of the targets: their mutual information with the rows.
    """
    found = _distributions(nodes, names)
    if found is None:
        return {}
    targets, logarithms = found
    facts: dict[str, Any] = {"target_sum": float(targets.sum(1).mean())}
    # Of numbers that are no probabilities, the divergence from their mean has no meaning.
    if not bool((targets >= 0).all()) or not math.isclose(facts["target_sum"], 1, abs_tol=0.01) or len(targets) < 2:
        return facts
    spread = information(targets)
    divergence = float((torch.special.xlogy(targets, targets) - targets * logarithms).sum(1).mean())
    if math.isfinite(divergence):
        facts |= {"constant_loss": spread, "term_loss": divergence}
    return facts | variation(information(logarithms.exp()), spread)


def _distributions(nodes: list[Any], names: list[str]) -> tuple[Tensor, Tensor] | None:
    """Return the targets and the logarithms of the outputs of a divergence, float64, shape (rows, classes).

    Its terms are t·(ln t − ln q), as of ``kl_div`` with ``log_target=True``, or t·ln t − t·ln q. Rows without any
    target, such as padding, are left out.
    """
    pairs = [(node, name) for node, name in zip(nodes, names, strict=True) if name not in VIEWS]
    kinds = [*itertools.dropwhile(_is_outside, pairs)][:3]
    form = [name for _, name in kinds]
    if form not in (["Sub", "Mul", "LogSoftmax"], ["Mul", "Sub", "LogSoftmax"]):
        return None
    product, softmax = kinds[form.index("Mul")][0], kinds[2][0]
    targets, logarithms = _factor(product), saved_value(softmax, "result")
    dimension = saved_integer(softmax, "dim")
    is_readable = isinstance(logarithms, Tensor) and logarithms.device.type == targets.device.type == "cpu"
    if not is_readable or dimension is None or targets.shape != logarithms.shape or not targets.numel():
        return None
    classes = targets.shape[dimension]
    rows = max(LEAST_ROWS, MOST_ELEMENTS // classes)
    wanted, given = (item.detach().movedim(dimension, -1).reshape(-1, classes) for item in (targets, logarithms))
    counted = (wanted != 0).any(1).nonzero().flatten()
    if not len(counted):
        return None
    counted = counted[:: -(-len(counted) // rows)]
    return wanted[counted].double(), given[counted].double()


def _is_outside(pair: tuple[Any, str]) -> bool:
    node, name = pair
    return name in REDUCTIONS or (name == "Mul" and not _factor(node).ndim)


def _factor(product: Any) -> Tensor:
    """Return the tensor with which a node multiplies its input, an empty one if it is unknown."""
    for name in ("self", "other"):
        if isinstance(value := saved_value(product, name), Tensor):
            return value
    return torch.empty(0, 0)
