"""What casts do to the products of a linear layer, and to what powers of two they scale."""

from collections.abc import Mapping, Sequence

import torch
from loopscope.lowbit.casts import Cast
from torch import Tensor

PRODUCTS = ("forward", "dgrad", "wgrad")
"""y = x Wᵀ, dx = g W and dW = gᵀ x, which sum over the inputs, the outputs and the tokens."""
ROWS = 64
"""Rows, and columns, of a product that are compared."""
ELEMENTS = 2**14
"""Of an output gradient that are looked at."""
LAYERS = 8
"""At even distances in the model, whose products are compared."""
LOWEST, EXPONENTS = -149, 278
"""Exponents of float32 numbers: the smallest, and how many there are."""


def some_rows(matrix: Tensor, most: int) -> Tensor:
    """Return the rows at even distances, ``most`` in all with that of the largest magnitude: it makes the scales.

    So blocks of a row, and the tensor, are scaled as in the whole matrix; one with no more rows comes back as it is.
    """
    if len(matrix) <= most:
        return matrix.contiguous()
    even = torch.linspace(0, len(matrix) - 1, max(1, most - 1), device=matrix.device).round().long()
    loudest = torch.linalg.vector_norm(matrix, torch.inf, dim=1).argmax()
    return matrix[torch.cat([even, loudest.reshape(1)])]


def oriented(gradient: Tensor) -> Mapping[str, Tensor]:
    """Return an output gradient (..., out) by product, with the dimension that this sums over as its last.

    Of one with more than ``ELEMENTS`` elements they are some rows.
    """
    rows = gradient.reshape(-1, gradient.shape[-1])
    views = {"dgrad": rows, "wgrad": rows.T}
    return {product: some_rows(view, max(2, ELEMENTS // max(1, view.shape[1]))) for product, view in views.items()}


def product_errors(x: Tensor, weight: Tensor, gradient: Tensor, casts: Sequence[Cast]) -> Tensor:
    """Return relative error ‖P̂ − P‖ / ‖P‖, cosine of P̂ and P, and 1, for each cast and product (casts, 3, 3).

    P̂ is the product of the operands after the cast, each in blocks along the dimension that the product sums over; P
    is that of the operands as they are, both in float32. Of P at most ``ROWS`` rows and columns are compared, those of
    :func:`some_rows`. A product that is zero, or not finite, gives zeros.

    Args:
        x: of shape (..., in).
        weight: (out, in).
        gradient: of the output, (..., out), with as many tokens as ``x``.
        casts: of all operands; a rule with a history takes the tensor's own largest magnitude.
    """
    x, gradient = (each.reshape(-1, each.shape[-1]) for each in (x, gradient))
    found = []
    for operands in ((x, weight), (gradient, weight.T), (gradient.T, x.T)):
        left, right = (some_rows(each, ROWS).float() for each in operands)
        exact = (left @ right.T).double()
        size = exact.norm()
        for cast in casts:
            narrow = (cast(left) @ cast(right).T).double()
            error, length = (narrow - exact).norm() / size, narrow.norm()
            cosine = torch.where(length > 0, (exact * narrow).sum() / (size * length), 0.0)
            numbers = torch.stack([error, cosine, torch.ones_like(error)])
            found.append(torch.where((size > 0) & size.isfinite(), numbers, 0.0))
    return torch.stack(found).view(len(PRODUCTS), len(casts), 3).transpose(0, 1)


def exponents(scales: Tensor) -> Tensor:
    """Count the scales above 0 by floor(log2), from ``LOWEST`` on; float64 (``EXPONENTS``,)."""
    place = (scales.float().reshape(-1).frexp().exponent.long() - 1 - LOWEST).clamp(0, EXPONENTS - 1)
    counts = torch.zeros(EXPONENTS, dtype=torch.float64, device=scales.device)
    return counts.scatter_add_(0, place, (scales.reshape(-1) > 0).double())
