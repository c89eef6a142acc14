"""Entanglement of consecutive steps: what a step changes about a gradient, measured on vectors."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from loopscope.state import Vector, accumulate, cosine, dot, minus, norm
from torch import Tensor


def curvature_along(direction: Vector, product: Vector) -> Tensor:
    """Return the Rayleigh quotient dᵀ(Hd)/‖d‖² from a direction d and the product H d."""
    return dot(direction, product) / dot(direction, direction)


def approximation(estimate: Vector, exact: Vector) -> dict[str, Tensor]:
    """Compare an estimate with the exact vector: its norm, the norm of the difference over ‖exact‖, the cosine."""
    return {
        "norm": norm(estimate),
        "error": norm(minus(estimate, exact)) / norm(exact),
        "cosine": cosine(estimate, exact),
    }


def entanglement_metrics(before: Vector, after: Vector, previous: Vector, update: Vector) -> dict[str, Tensor]:
    """Describe the change of a gradient from ``before`` to ``after`` by an ``update`` made from batch A.

    ``previous`` is the gradient of A, ``before`` and ``after`` those of batch B around the update.
    """
    change = minus(after, before)
    return {
        "entanglement_norm": norm(change),
        "entanglement_ratio": norm(change) / norm(before),
        "entanglement_cosine": cosine(change, before),
        "gradient_cosine": cosine(previous, before),
        "update_norm": norm(update),
    }


def own_step_metrics(before: Vector, after: Vector, update: Vector, loss_change: Tensor) -> dict[str, Tensor]:
    """Describe what an update did to the batch that it was made from: gradients around it and the loss change."""
    change = minus(after, before)
    predicted = dot(before, update)
    return {
        "own_loss_change": loss_change,
        "own_loss_change_predicted": predicted,
        "own_gain_ratio": loss_change / predicted,
        "own_entanglement_ratio": norm(change) / norm(before),
        "own_entanglement_cosine": cosine(change, before),
        "own_curvature": curvature_along(update, change),
    }


def solution_metrics(solution: Vector, update: Vector, change: Vector, before: Vector) -> dict[str, Tensor]:
    """Hold an update, the entanglement ``change`` and the gradient ``before`` against the way to a solution.

    ``solution`` is θ_ref − θ. Positive is towards the reference: gradients count by the descent that they cause.
    """
    return {
        "update_solution_cosine": cosine(update, solution),
        "entanglement_solution_cosine": -cosine(change, solution),
        "gradient_solution_cosine": -cosine(before, solution),
    }


def preconditioned_curvature(direction: Vector, product: Vector, preconditioner: Vector) -> Tensor:
    """Return dᵀHd/dᵀPd, the Rayleigh quotient of P^(−1/2)·H·P^(−1/2) along P^(1/2)·d, from d, H d and a diagonal P."""
    weighted = {name: value * preconditioner[name] for name, value in direction.items() if name in preconditioner}
    return dot(direction, product) / dot(direction, weighted)


@dataclass(frozen=True)
class Departure:
    """Where a step set out from: its number, the parameters before it, the learning rate of each of them.

    ``threshold`` is the curvature that the optimizer bears at these learning rates, if it is known.
    """

    step: int
    parameters: Mapping[str, Tensor]
    rates: Mapping[str, float]
    threshold: float | None = None

    def sgd_update(self, gradient: Vector) -> dict[str, Tensor]:
        """Return −η·g, the update that plain SGD would have made of ``gradient``."""
        return {name: -self.rates[name] * value for name, value in gradient.items() if name in self.rates}


@dataclass
class Trail:
    """The entanglements of the burst under way: the last one, their sum, and the sum of their norms."""

    last: Mapping[str, Tensor] = field(default_factory=dict)
    total: Mapping[str, Tensor] = field(default_factory=dict)
    length: Tensor | None = None

    def add(self, change: Vector) -> dict[str, Tensor]:
        """Record an entanglement; from the second on, return how it agrees with those before."""
        last, total = placed_like(change, self.last), placed_like(change, self.total)
        length = norm(change)
        self.last, self.total = change, accumulate(total, change)
        if self.length is None:
            self.length = length
            return {}
        self.length = self.length.to(length.device) + length
        return {"coherence": cosine(change, last), "burst_coherence": norm(self.total) / self.length}


def placed_like(live: Vector, values: Vector) -> dict[str, Tensor]:
    """Move values, which may come from a checkpoint, to the devices of the live tensors of their names."""
    return {name: values[name].to(tensor.device) for name, tensor in live.items() if name in values}
