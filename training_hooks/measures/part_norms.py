"""Norms of many tensors at once, as close to exact as float32 numbers allow."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from framework.param_vectors import WIDE

ROW = 1024
"""Elements that are added up in one go: of a million, rounding would leave an error of 1e-5, of these one of 1e-7."""
WHOLE = 2 * ROW
"""Elements up to which a tensor is added up in one go all the same: below, rows are not worth their calls."""


def norms(tensors: Sequence[Tensor], order: float = 2) -> Tensor:
    """Return the norm of each tensor's elements (order 1, 2 or infinity) in float32 or wider, shape (tensors,)."""
    dtype = torch.float64 if any(tensor.dtype is torch.float64 for tensor in tensors) else torch.float32
    folded = [_folded(tensor, order) for tensor in tensors]
    return stacked(torch._foreach_norm(folded, order, dtype=dtype))


def stacked(values: Sequence[Tensor]) -> Tensor:
    """Return zero-dimensional tensors of any devices as one vector on the first one's."""
    if len({value.device for value in values}) > 1:
        return torch.stack([value.to(values[0].device) for value in values])
    return torch.stack(list(values))


def _folded(tensor: Tensor, order: float) -> Tensor:
    """Return fewer numbers of the same norm; what is on an accelerator, which adds up in a tree, as it is."""
    if not tensor.numel():
        return tensor.new_zeros(1)
    if tensor.numel() <= WHOLE or tensor.device.type != "cpu":
        return tensor
    if math.isinf(order):
        return torch.stack(torch.aminmax(tensor))
    flat = tensor.reshape(-1)
    end = len(flat) // ROW * ROW
    wide = tensor.dtype if tensor.dtype in WIDE else torch.float32
    rows = torch.linalg.vector_norm(flat[:end].view(-1, ROW), order, dim=1, dtype=wide)
    return torch.cat([rows, flat[end:].to(wide)]) if end < len(flat) else rows


def differences(before: Sequence[Tensor], now: Sequence[Tensor]) -> list[Tensor]:
    """Return ``before − now`` in float32 or wider; overwrites those of ``before`` that are in float32 or wider."""
    if all(tensor.dtype in WIDE for tensor in before):
        torch._foreach_sub_(list(before), list(now))
        return list(before)
    pairs = zip(before, now, strict=True)
    return [one.sub_(other) if one.dtype in WIDE else one.float() - other.float() for one, other in pairs]
