"""Checks of exact Hessian-vector products: against their symmetry, and against finite differences of the gradient.

Automatic differentiation computes wrong second derivatives without an error where the backward pass of a function uses
values that autograd takes for constants, as torch's weight norm does, and fused losses that save their gradient.
"""

import itertools
import math
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from ..tensors import Vector, dot, minus, norm

ASYMMETRY = 0.03
"""Smallest relative asymmetry of wrong products: measured are at most 0.006 for correct ones in bfloat16, at least 0.05
for weight norm, and 1e-5 for correct ones in float32."""
DIFFERENCE = 0.02
"""Smallest relative difference from accurate finite differences; correct products in float32 are at most 0.003 off."""
MARGIN = 4
"""The difference must exceed the uncertainty of finite differences by this factor. Jumps of the gradient, as those of
ReLU, are only in the finite differences, which then depend on the step: the measured factor is at most 2.4."""


def random_signs(parameters: Mapping[str, nn.Parameter], count: int) -> list[dict[str, Tensor]]:
    """Return vectors of random ±1, the same in every process, without using the run's random streams."""
    generator = torch.Generator().manual_seed(0)
    return [
        {
            name: (2 * torch.randint(2, leaf.shape, generator=generator) - 1).to(leaf.device, leaf.dtype)
            for name, leaf in parameters.items()
        }
        for _ in range(count)
    ]


def asymmetry(times: Callable[[Vector], Vector], parameters: Mapping[str, nn.Parameter]) -> float:
    """Return the largest relative asymmetry of products with three random vectors, 0 for a symmetric operator."""
    pairs = [(vector, times(vector)) for vector in random_signs(parameters, 3)]
    # |uᵀHv − vᵀHu| / (‖Hu‖ + ‖Hv‖): elements of ±1 make uᵀ(Hv − Hᵀv) about as large as ‖Hv − Hᵀv‖.
    ratios = [
        float((dot(u, product_v) - dot(v, product_u)).abs() / (norm(product_u) + norm(product_v)))
        for (u, product_u), (v, product_v) in itertools.combinations(pairs, 2)
    ]
    return max((ratio for ratio in ratios if math.isfinite(ratio)), default=0.0)


def directions(gradient: Vector) -> list[tuple[dict[str, Tensor], float]]:
    """Return vectors to compare products at, each with a factor of the finite step.

    These are the gradient, and its part in the last parameters, usually those of the output layer: a step along them
    moves no activation across the kink of a ReLU, so that it can be long, and rounding matters less.
    """
    nonzero = [name for name, value in gradient.items() if float(norm({name: value})) > 0]
    last = {name: gradient[name] for name in nonzero[-1:]}
    return [(dict(gradient), 1.0), (last, 4.0)] if nonzero else []


def excess_difference(product: Vector, difference: Callable[[float], Vector], epsilon: float) -> float:
    """Return the relative difference of a product from finite differences, or 0 where these are too uncertain.

    Args:
        product: H v.
        difference: maps a step to the central difference of the gradient.
        epsilon: the smaller of two steps; the other one is four times as long.
    """
    long, short = difference(4 * epsilon), difference(epsilon)
    size, distance = float(norm(short)), float(norm(minus(product, short)))
    # ‖FD(4ε) − FD(ε)‖ bounds the error of FD(ε) by truncation, and estimates that by rounding.
    uncertainty = float(norm(minus(long, short)))
    is_uncertain = size == 0 or not math.isfinite(distance + uncertainty)  # 0: the step is lost to rounding
    if is_uncertain or distance <= DIFFERENCE * size + MARGIN * uncertainty:
        return 0.0
    return distance / max(size, float(norm(product)))


def find_problem(
    times: Callable[[Vector], Vector],
    gradient: Callable[[], Vector],
    difference: Callable[[Vector, float], Vector],
    parameters: Mapping[str, nn.Parameter],
    epsilon: float,
) -> str:
    """Return why exact products are wrong, as a clause, or an empty text.

    Args:
        times: multiplies a vector by the Hessian; is not called after ``difference``, which moves the parameters.
        gradient: returns the gradient.
        difference: returns the product with a vector by finite differences with the given step.
        parameters: the trainable parameters by name.
        epsilon: the step of finite differences.
    """
    share = asymmetry(times, parameters)
    if share > ASYMMETRY:
        return f"exact products are asymmetric by {share:.0%}, so torch's second derivatives are wrong for this model"
    if any(leaf.element_size() < 4 for leaf in parameters.values()):
        return ""  # in bfloat16 and float16 most elements of a short step round to nothing
    compared = [(vector, factor, times(vector)) for vector, factor in directions(gradient())]
    for vector, factor, product in compared:
        share = excess_difference(product, partial(difference, vector), factor * epsilon)
        if share:
            return (
                f"exact products differ by {share:.0%} from accurate finite differences, so torch's second "
                "derivatives are wrong for this model or loss"
            )
    return ""
