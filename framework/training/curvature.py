"""Hessian-vector products of a loss: exact by reverse over reverse, and by central differences of its gradient."""

from collections.abc import Callable, Mapping
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..state import Vector, axpy, copied, minus, norm, overwrite, scaled

Method = Literal["exact", "finite_difference"]
METHODS: tuple[str, ...] = get_args(Method)


class ExactHessian:
    """The Hessian of a loss at the present parameters: reverse over reverse through the kept graph of the gradient.

    Attention runs by its MATH kernel, the only one with a second derivative.

    Args:
        compute_loss: returns the loss, zero-dimensional.
        parameters: what to differentiate for.
    """

    def __init__(self, compute_loss: Callable[[], Tensor], parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = parameters
        with sdpa_kernel(SDPBackend.MATH):
            self._gradients = torch.autograd.grad(
                compute_loss(), list(parameters.values()), create_graph=True, allow_unused=True
            )

    def times(self, vector: Vector, *, keep: bool = True) -> dict[str, Tensor]:
        """Return H v by differentiating ⟨∇L, v⟩; names that ``vector`` lacks are zeros.

        Parameters on which the loss does not depend, or only linearly, have zeros. Without ``keep`` the graph is
        freed, and this was the last product.
        """
        pairs = [
            (gradient, vector[name].to(gradient.dtype))
            for name, gradient in zip(self._parameters, self._gradients, strict=True)
            if gradient is not None and gradient.requires_grad and name in vector
        ]
        if not pairs:
            return {name: torch.zeros_like(leaf) for name, leaf in self._parameters.items()}
        second = torch.autograd.grad(
            [gradient for gradient, _ in pairs],
            list(self._parameters.values()),
            grad_outputs=[direction for _, direction in pairs],
            retain_graph=keep,
            allow_unused=True,
            materialize_grads=True,
        )
        return dict(zip(self._parameters, second, strict=True))


def central_difference(
    gradient: Callable[[], Vector], parameters: Mapping[str, nn.Parameter], vector: Vector, epsilon: float
) -> dict[str, Tensor]:
    """Return (g(θ + hu) − g(θ − hu))·‖v‖/2h with u = v/‖v‖ and h = ``epsilon``: H v up to O(h²), zeros for v = 0.

    The parameters are moved in place and put back by copying, so they end with the bytes they began with.
    """
    length = norm(vector)
    before = copied({name: parameters[name] for name in vector})
    sides = []
    try:
        for side in (epsilon, -epsilon):
            step = torch.where(length > 0, side / length, 0.0)
            overwrite(parameters, axpy(step, vector, before))
            sides.append(gradient())
    finally:
        overwrite(parameters, before)
    found = scaled(length / (2 * epsilon), minus(sides[0], sides[1]))
    return {name: found.get(name, torch.zeros_like(leaf)) for name, leaf in parameters.items()}
