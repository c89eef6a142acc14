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
KEPT = 2**22
"""Values of operands that are kept until they are cast."""
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


def operands(x: Tensor, weight: Tensor, gradient: Tensor) -> list[Tensor]:
    """Return what the three products of a linear layer multiply, a left and a right matrix (ROWS, n) for each.

    The product is left @ right.T; of larger matrices they are :func:`some_rows`, of which a product has as many rows
    and columns. They are copies: what is given may be written over, or freed as FSDP2 does, once the layer is done.

    Args:
        x: of shape (..., in).
        weight: (out, in).
        gradient: of the output, (..., out), with as many tokens as ``x``.
    """
    x, gradient = (each.reshape(-1, each.shape[-1]) for each in (x, gradient))
    pairs = ((x, weight), (gradient, weight.T), (gradient.T, x.T))
    rows = [(matrix, some_rows(matrix, ROWS).float()) for pair in pairs for matrix in pair]
    return [found.clone() if found is matrix else found for matrix, found in rows]


def product_errors(layers: Sequence[Sequence[Tensor]], casts: Sequence[Cast]) -> Tensor:
    """Return relative error ‖P̂ − P‖ / ‖P‖, cosine of P̂ and P, and 1, for each cast and product (casts, 3, 3).

    P̂ is the product of the operands after the cast, each in blocks along the dimension that the product sums over; P
    is that of the operands as they are, both in float32. They are sums over the layers, to which a product that is
    zero, or not finite, adds zeros.

    Args:
        layers: the :func:`operands` of each.
        casts: of all operands; a rule with a history takes the tensor's own largest magnitude.
    """
    matrices = [matrix for layer in layers for matrix in layer]
    narrow = [torch.stack(each) for each in zip(*(_cast_each(cast, matrices) for cast in casts), strict=True)]
    found = []
    for left, right, a, b in zip(matrices[::2], matrices[1::2], narrow[::2], narrow[1::2], strict=True):
        exact, after = (left @ right.T).double(), (a @ b.mT).double()  # the second of shape (casts, rows, columns)
        size, lengths = exact.norm(), after.norm(dim=(1, 2))
        errors = (after - exact).norm(dim=(1, 2)) / size
        cosines = torch.where(lengths > 0, (after * exact).sum((1, 2)) / (size * lengths), 0.0)
        numbers = torch.stack([errors, cosines, torch.ones_like(errors)], 1)
        found.append(torch.where((size > 0) & size.isfinite(), numbers, 0.0))
    return torch.stack(found).view(len(layers), len(PRODUCTS), len(casts), 3).sum(0).transpose(0, 1)


def _cast_each(cast: Cast, matrices: Sequence[Tensor]) -> list[Tensor]:
    """Cast matrices by scales of their own, those of one shape in one call, since calls are what costs."""
    places: dict[torch.Size, list[int]] = {}
    for place, matrix in enumerate(matrices):
        places.setdefault(matrix.shape, []).append(place)
    found = list(matrices)
    for alike in places.values():
        together = torch.stack([matrices[place] for place in alike])
        try:
            after = torch.func.vmap(cast)(together)
        except RuntimeError:  # a user's scaling rule may ask what a tensor holds, which vmap does not allow
            after = torch.stack([cast(matrix) for matrix in together])
        for place, each in zip(alike, after.unbind(), strict=True):
            found[place] = each
    return found


def exponents(scales: Tensor) -> Tensor:
    """Count the scales above 0 by floor(log2), from ``LOWEST`` on; float64 (``EXPONENTS``,)."""
    place = (scales.float().reshape(-1).frexp().exponent.long() - 1 - LOWEST).clamp(0, EXPONENTS - 1)
    counts = torch.zeros(EXPONENTS, dtype=torch.float64, device=scales.device)
    return counts.scatter_add_(0, place, (scales.reshape(-1) > 0).double())
