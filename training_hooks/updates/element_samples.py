"""Deterministic samples of a parameter's elements, independent of run, machine and number of ranks."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from loopscope.tensors import laid_out_like, local_shards
from torch import Tensor

from ..measures import splitmix64

FNV_OFFSET, FNV_PRIME = 0xCBF29CE484222325, 0x100000001B3
LARGEST_INT32 = 2**31 - 1


def fnv1a(text: str) -> int:
    """Return the FNV-1a hash of a text's UTF-8 bytes, 64 bits (http://www.isthe.com/chongo/tech/comp/fnv).

    >>> hex(fnv1a("foobar"))
    '0x85944171f73967e8'
    """
    value = FNV_OFFSET
    for byte in text.encode():
        value = (value ^ byte) * FNV_PRIME % 2**64
    return value


def sample_indices(name: str, shape: Sequence[int], size: int) -> Tensor | None:
    """Draw ``size`` of a parameter's elements without replacement; return ascending indices of the flat parameter.

    The seed is the FNV-1a hash of name and shape. Numbers are drawn until enough of them are distinct. For samples of
    more than half of the elements, the excluded elements are drawn instead.

    Returns:
        Indices of shape (size,), int32 (int64 for more than 2³¹ − 1 elements), or ``None`` if the parameter has at most
        ``size`` elements, which means all of them.
    """
    elements = math.prod(shape)
    if elements <= size:
        return None
    seed = fnv1a(f"{name}{tuple(shape)}")
    if size <= elements // 2:
        indices = torch.tensor(_draw_distinct(seed, elements, size)).sort().values
    else:
        included = torch.ones(elements, dtype=torch.bool)
        included[_draw_distinct(seed, elements, elements - size)] = False
        indices = included.nonzero().flatten()
    return indices if elements > LARGEST_INT32 else indices.int()


def _draw_distinct(seed: int, below: int, count: int) -> list[int]:
    """Return the first ``count`` distinct numbers below ``below`` in the order drawn; ``below`` ≥ 2·``count``."""
    draws = count
    while True:
        # 2c draws from n ≥ 2c numbers have on average at least 2c·(1 − 1/e) ≈ 1.26c distinct ones.
        draws *= 2
        numbers = splitmix64(seed, draws).bitwise_and(2**63 - 1) % below
        distinct = list(dict.fromkeys(numbers.tolist()))
        if len(distinct) >= count:
            return distinct[:count]


def local_indices(parameter: Any, indices: Tensor) -> Tensor:
    """Translate indices of a DTensor into indices of this rank's flattened shard, dropping elements of other ranks.

    ``indices`` are ascending indices of the flattened complete parameter. Temporarily takes memory for one integer per
    element of the complete parameter.
    """
    # Distribute the elements' numbers like the parameter: this rank's part then lists the elements of its shard.
    numbers = torch.arange(parameter.numel(), dtype=indices.dtype, device=parameter.device).view(parameter.shape)
    shard_numbers = local_shards([laid_out_like(numbers, parameter)])[0].flatten()
    wanted = indices.to(shard_numbers.device)
    positions = torch.searchsorted(shard_numbers, wanted)
    inside = positions < len(shard_numbers)
    positions, wanted = positions[inside], wanted[inside]
    return positions[shard_numbers[positions] == wanted].to(indices.dtype)
