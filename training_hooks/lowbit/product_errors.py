"""Errors of a linear layer's products under casts, and exponents of the casts' scales."""

from collections.abc import Mapping, Sequence

import torch
from loopscope.lowbit.casts import Cast
from loopscope.tensors import scale_of
from torch import Tensor

from ..measures import spread_indices

PRODUCTS = ("forward", "dgrad", "wgrad")
"""The products y = x Wᵀ, dx = g W and dW = gᵀ x, which sum over the inputs, the outputs and the tokens."""
ROWS = 64
"""Number of rows, and of columns, of a product that are compared."""
ELEMENTS = 2**14
"""Number of elements of an output gradient that are measured, if they are at least ``LEAST_ROWS`` rows."""
LEAST_ROWS = 64
LAYERS = 8
"""Number of evenly spaced layers whose products are compared."""
KEPT = 2**20
"""Largest number of operand values that are kept before they are cast."""
LOWEST, EXPONENTS = -149, 278
"""The smallest exponent of float32 numbers, and the number of exponents."""


def sample_rows(matrix: Tensor, most: int) -> Tensor:
    """Return ``most`` rows of a matrix: evenly spaced ones, and the row with the largest magnitude.

    That row sets a per-tensor scale, so the rows are scaled as in the whole matrix. A matrix with at most ``most`` rows
    is returned whole.
    """
    if len(matrix) <= most:
        return matrix.contiguous()
    spaced = torch.linspace(0, len(matrix) - 1, max(1, most - 1), device=matrix.device).round().long()
    # Ten times faster than vector_norm with the order infinity, and without a copy
    largest = torch.maximum(matrix.amax(1), -matrix.amin(1)).argmax()
    return matrix[torch.cat([spaced, largest.reshape(1)])]


def gradient_operands(gradient: Tensor) -> Mapping[str, Tensor]:
    """Return an output gradient (..., out) as the operand of each backward product, summed dimension last.

    An operand with more than ``ELEMENTS`` elements is reduced to evenly spread rows, at least ``LEAST_ROWS``. They are
    an unbiased sample: the row with the largest magnitude is in it only by chance, since in the output layer of a
    trained model single rows have most of the energy. So a per-tensor scale is that of the sample.
    """
    rows = gradient.reshape(-1, gradient.shape[-1])
    return {"dgrad": _spread_rows(rows), "wgrad": _spread_rows(rows.T)}


def _spread_rows(matrix: Tensor) -> Tensor:
    most = max(LEAST_ROWS, ELEMENTS // max(1, matrix.shape[1]))
    if len(matrix) <= most:
        return matrix.contiguous()
    return matrix[spread_indices(len(matrix), most).to(matrix.device)]


def operands(x: Tensor, weight: Tensor, gradient: Tensor) -> list[Tensor]:
    """Return the operands of a linear layer's three products: a left and a right matrix (ROWS, n) for each.

    The product is left @ right.T. Larger matrices are reduced to :func:`sample_rows`. The operands are copies, since
    the layer may overwrite the given tensors afterwards, and FSDP2 frees them.

    Args:
        x: of shape (..., in).
        weight: (out, in).
        gradient: of the output, (..., out), with as many tokens as ``x``.
    """
    x, gradient = (values.reshape(-1, values.shape[-1]) for values in (x, gradient))
    pairs = ((x, weight), (gradient, weight.T), (gradient.T, x.T))
    samples = [(matrix, sample_rows(matrix, ROWS).float()) for pair in pairs for matrix in pair]
    return [sample.clone() if sample is matrix else sample for matrix, sample in samples]


def product_errors(layers: Sequence[Sequence[Tensor]], casts: Sequence[Cast]) -> Tensor:
    """Return relative error ‖P̂ − P‖ / ‖P‖, cosine of P̂ and P, and 1, summed over layers; shape (casts, products, 3).

    P̂ is the product of the cast operands, with blocks along the summed dimension; P is the product of the original
    operands. Both are computed in float32. A product that is zero or not finite adds zeros to the sums.

    Args:
        layers: the :func:`operands` of each layer.
        casts: applied to all operands; a rule with a history uses the tensor's current largest magnitude.
    """
    matrices = [matrix for layer in layers for matrix in layer]
    narrow = [torch.stack(results) for results in zip(*(_cast_each(cast, matrices) for cast in casts), strict=True)]
    rows = []
    # left, right: (ROWS, n); narrow_left, narrow_right: (casts, ROWS, n)
    for left, right, narrow_left, narrow_right in zip(
        matrices[::2], matrices[1::2], narrow[::2], narrow[1::2], strict=True
    ):
        # Errors and cosines do not depend on the sizes of the operands, which powers of two bring near 1.
        left_size, right_size = scale_of(left), scale_of(right)
        exact = (left / left_size @ (right / right_size).T).double()
        rounded = (narrow_left / left_size @ (narrow_right / right_size).mT).double()  # (casts, rows, columns)
        exact_norm, rounded_norms = exact.norm(), rounded.norm(dim=(1, 2))
        # ‖P̂ − P‖/‖P‖ and ⟨P̂, P⟩/(‖P̂‖‖P‖), shapes (casts,)
        errors = (rounded - exact).norm(dim=(1, 2)) / exact_norm
        cosines = (rounded * exact).sum((1, 2)) / (exact_norm * rounded_norms)
        cosines = torch.where(rounded_norms > 0, cosines.clamp(-1, 1), 0.0)
        numbers = torch.stack([errors, cosines, torch.ones_like(errors)], 1)
        rows.append(torch.where((exact_norm > 0) & exact_norm.isfinite(), numbers, 0.0))
    return torch.stack(rows).view(len(layers), len(PRODUCTS), len(casts), 3).sum(0).transpose(0, 1)


def _cast_each(cast: Cast, matrices: Sequence[Tensor]) -> list[Tensor]:
    """Cast each matrix with its own scales; matrices of one shape share a call, since calls dominate the time."""
    indices_by_shape: dict[torch.Size, list[int]] = {}
    for index, matrix in enumerate(matrices):
        indices_by_shape.setdefault(matrix.shape, []).append(index)
    results = list(matrices)
    for indices in indices_by_shape.values():
        batch = torch.stack([matrices[index] for index in indices])
        try:
            rounded = torch.func.vmap(cast)(batch)
        except RuntimeError:  # vmap forbids data-dependent control flow, which a user's scaling rule may have
            rounded = torch.stack([cast(matrix) for matrix in batch])
        for index, result in zip(indices, rounded.unbind(), strict=True):
            results[index] = result
    return results


def exponents(scales: Tensor) -> Tensor:
    """Count the positive scales by floor(log2), starting at ``LOWEST``; float64, shape (``EXPONENTS``,)."""
    # frexp gives m·2ᵉ with m in [0.5, 1), so floor(log2) is e − 1.
    bins = (scales.float().reshape(-1).frexp().exponent.long() - 1 - LOWEST).clamp(0, EXPONENTS - 1)
    counts = torch.zeros(EXPONENTS, dtype=torch.float64, device=scales.device)
    return counts.scatter_add_(0, bins, (scales.reshape(-1) > 0).double())
