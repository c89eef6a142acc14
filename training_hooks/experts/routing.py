"""Routing decisions of mixture-of-experts layers: read from the outputs of their routers, and counted."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from loopscope.tensors import unsharded
from torch import Tensor
from torch.utils._pytree import tree_iter

Scores = Literal["softmax", "sigmoid"]


@dataclass(frozen=True)
class Routing:
    """The output of a router for N tokens and E experts.

    Args:
        logits: the router's logits, shape (N, E).
        chosen: the k experts of each token, shape (N, k); a number outside of 0..E − 1 marks a dropped assignment.
        dispatched: whether a token reaches an expert within its capacity, shape (N, E); ``None`` without a capacity.
        are_probabilities: zero-dimensional: the router returned probabilities, whose logits are unknown. ``logits`` are
            then ln p.
    """

    logits: Tensor
    chosen: Tensor
    dispatched: Tensor | None
    are_probabilities: Tensor

    @property
    def experts(self) -> int:
        """Number of experts."""
        return self.logits.shape[-1]


def read_routing(output: Any, top_k: int, logits_index: int | None = None) -> Routing | None:
    """Return the routing in a router's output, or ``None`` if the output has no logits.

    The output is the logits, or a tuple of logits, the chosen experts, and further tensors in any order. Without chosen
    experts, those with the ``top_k`` largest logits are chosen.

    Args:
        output: the output of the module.
        top_k: number of experts per token; 0 if it is unknown, which the chosen experts must then tell.
        logits_index: position of the logits in a tuple, if the model declares it.
    """
    tensors = [unsharded(leaf) for leaf in tree_iter(output) if isinstance(leaf, Tensor)]
    floats = [tensor for tensor in tensors if tensor.is_floating_point() and tensor.ndim >= 2]
    is_declared = isinstance(output, tuple) and logits_index is not None and logits_index < len(output)
    declared = output[logits_index] if is_declared else None
    if isinstance(declared, Tensor):
        logits = unsharded(declared)
    elif floats:
        # Scores have one column per chosen expert, logits one per expert; of equally wide tensors, the first one.
        logits = max(floats, key=lambda tensor: tensor.shape[-1])
    else:
        return None
    experts = logits.shape[-1]
    wide = logits.detach().reshape(-1, experts)
    wide = wide if wide.dtype == torch.float64 else wide.float()
    sums_to_one = (wide.sum(-1) - 1).abs() < 1e-3
    are_probabilities = (wide >= 0).all() & sums_to_one.all()
    wide = torch.where(are_probabilities, wide.log(), wide)
    chosen, dispatched = _decisions(tensors, experts, top_k)
    if chosen is None:
        if not top_k:
            return None
        chosen = wide.topk(min(top_k, experts), dim=-1).indices
    return Routing(wide, chosen, dispatched, are_probabilities)


def _decisions(tensors: list[Tensor], experts: int, top_k: int) -> tuple[Tensor | None, Tensor | None]:
    """Return the chosen experts and the mask of dispatched tokens among the tensors of an output."""
    for tensor in tensors:
        if tensor.is_floating_point() or tensor.is_complex() or tensor.ndim < 2:
            continue
        flat = tensor.detach().reshape(-1, tensor.shape[-1])
        if flat.dtype == torch.bool or (flat.shape[-1] == experts and top_k != experts):
            return None, flat != 0  # such as Switch Transformers
        return flat.long(), None
    return None, None


def width_of_counts(experts: int) -> int:
    """Return the length of the result of :func:`count_routing`."""
    return 2 * experts + 5


def count_routing(routing: Routing, scores: Scores = "softmax", capacity_factor: float = 0.0) -> Tensor:
    """Return the sums over the tokens of one pass, which add up over passes and ranks; shape (2E + 5,), float64.

    They are T_e for each expert, Σ p_e for each expert, Σ (ln Σ exp)², the tokens, the assignments, the dropped
    assignments, and whether the outputs were logits (as a count of tokens). p is the softmax of the logits, or their
    sigmoid divided by its sum.

    Args:
        routing: the routing of the pass.
        scores: how the router turns logits into scores.
        capacity_factor: assignments beyond ⌈capacity_factor · assignments / E⌉ of an expert count as dropped, unless
            the router's output tells the dropped ones; 0: none.
    """
    logits, experts = routing.logits, routing.experts
    counts, dropped = _loads(routing)
    tokens, assignments = len(logits), counts.new_full((), routing.chosen.numel())
    if capacity_factor and routing.dispatched is None:
        capacity = torch.ceil(capacity_factor * assignments / experts)
        dropped = dropped + (counts - capacity).clamp(min=0).sum()
    # Large negative logits underflow in the sigmoid, but not in its logarithm.
    log_scores = torch.nn.functional.logsigmoid(logits) if scores == "sigmoid" else logits
    shares = log_scores.softmax(-1)
    log_z = logits.logsumexp(-1).double()
    are_logits = torch.logical_not(routing.are_probabilities).double() * tokens
    rest = torch.stack([log_z.square().sum(), log_z.new_full((), tokens), assignments, dropped, are_logits])
    return torch.cat([counts, shares.sum(0, dtype=torch.float64), rest])


def _loads(routing: Routing) -> tuple[Tensor, Tensor]:
    """Return the assignments to each expert, before any capacity, and the dropped assignments; float64."""
    experts, chosen = routing.experts, routing.chosen.flatten()
    is_expert = (chosen >= 0) & (chosen < experts)
    # Index E collects the markers of dropped assignments. Integers add up exactly in any order.
    counts = torch.zeros(experts + 1, dtype=torch.int64, device=chosen.device)
    counts.scatter_add_(0, torch.where(is_expert, chosen, experts), torch.ones_like(chosen))
    dropped = counts[-1]
    if routing.dispatched is not None:
        dropped = dropped + counts[:-1].sum() - routing.dispatched.sum()
    return counts[:-1].double(), dropped.double()


@dataclass(frozen=True)
class LayerCounts:
    """The sums of :func:`count_routing` of one layer over the passes and ranks of a step, on the host."""

    load: list[float]
    score_sums: list[float]
    square_sum: float
    tokens: float
    assignments: float
    dropped: float
    tokens_with_logits: float

    @classmethod
    def of(cls, sums: list[float]) -> "LayerCounts":
        """Return the counts from the values of the sums."""
        experts = (len(sums) - 5) // 2
        return cls(sums[:experts], sums[experts : 2 * experts], *sums[2 * experts :])

    @property
    def experts(self) -> int:
        """Number of experts."""
        return len(self.load)

    def relative_load(self) -> Iterator[float]:
        """Yield T_e / mean T for each expert; NaN if no token reaches any expert."""
        total = math.fsum(self.load)
        return (load * self.experts / total if total else math.nan for load in self.load)

    def measures(self) -> dict[str, float]:
        """Return the measures of the layer by name."""
        relative = list(self.relative_load())
        shares = [value / self.experts for value in relative]
        entropy = -math.fsum(share * math.log(share) if share else 0.0 for share in shares)
        entropy = math.nan if math.isnan(relative[0]) else entropy
        # f_e = T_e / Σ T, the share of all assignments; P_e = Σ p_e / tokens.
        product = math.fsum(share * score for share, score in zip(shares, self.score_sums, strict=True))
        return {
            "max_violation": max(relative) - 1 if relative[0] == relative[0] else math.nan,
            "load_variation": math.sqrt(math.fsum((value - 1) ** 2 for value in relative) / self.experts),
            "load_entropy": min(entropy / math.log(self.experts), 1.0) if self.experts > 1 else math.nan,
            "dead_experts": float(sum(load == 0 for load in self.load)),
            "dropped_share": self.dropped / self.assignments if self.assignments else math.nan,
            "router_z": self.square_sum / self.tokens if self.tokens_with_logits == self.tokens > 0 else math.nan,
            "balance_loss": self.experts * product / self.tokens if self.tokens else math.nan,
        }
