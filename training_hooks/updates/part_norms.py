"""Norms of many tensors at once, as close to exact as float32 numbers allow."""

import math
from collections.abc import Sequence

import torch
from loopscope.state import WIDE
from torch import Tensor

ROW = 1024
"""Elements that are added up in one go: of a million, rounding would leave an error of 1e-5, of these one of 1e-7."""
WHOLE = 2 * ROW
"""Elements up to which a tensor is added up in one go all the same: below, rows are not worth their calls."""


def norms(tensors: Sequence[Tensor], order: float = 2) -> Tensor:
    """Return the norm of each tensor's elements (order 1, 2 or infinity) in float32 or wider, shape (tensors,).

    All are on one device.
    """
    dtype = torch.float64 if any(tensor.dtype is torch.float64 for tensor in tensors) else torch.float32
    folded = [_folded(tensor, order) for tensor in tensors]
    found = torch._foreach_norm(folded, order, dtype=dtype)
    return torch.stack(found)


def _folded(tensor: Tensor, order: float) -> Tensor:
    """Return fewer numbers of the same norm; what is on an accelerator, which adds up in a tree, as it is."""
    if not tensor.numel():
        return tensor.new_zeros(1)
    if tensor.numel() <= WHOLE or tensor.device.type != "cpu":
        return tensor
    if math.isinf(order):
        return torch.stack(torch.aminmax(tensor))
    flat = tensor.reshape(-1)
    end = flat.numel() // ROW * ROW
    rows, rest = flat[:end].view(-1, ROW), flat[end:]
    wide = tensor.dtype if tensor.dtype in WIDE else torch.float32
    slow = order == 1  # torch has no fast norm of this order
    sums = rows.abs().sum(1, dtype=wide) if slow else torch.linalg.vector_norm(rows, order, dim=1, dtype=wide)
    return torch.cat([sums, rest.to(wide)]) if end < flat.numel() else sums
