"""Which elements of a parameter are sampled: the same on every run, machine and number of ranks."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from loopscope.state import laid_out_like, local_shards
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
    """Draw ``size`` of a parameter's elements without replacement: ascending places in the flattened parameter.

    The seed is the FNV-1a hash of name and shape. Numbers are drawn until enough of them differ; beyond half of the
    elements those to leave out are drawn. Returns shape (size,), int32 (int64 for more than 2³¹ − 1 elements), or
    ``None`` for a parameter that is taken whole since it has no more elements than that.
    """
    elements = math.prod(shape)
    if elements <= size:
        return None
    seed = fnv1a(f"{name}{tuple(shape)}")
    if size <= elements // 2:
        chosen = torch.tensor(_distinct(seed, elements, size)).sort().values
    else:
        stays = torch.ones(elements, dtype=torch.bool)
        stays[_distinct(seed, elements, elements - size)] = False
        chosen = stays.nonzero().flatten()
    return chosen if elements > LARGEST_INT32 else chosen.int()


def _distinct(seed: int, below: int, count: int) -> list[int]:
    """Return the first ``count`` different numbers below ``below``, at least twice ``count``, in the order drawn."""
    draws = count
    while True:
        draws *= 2
        numbers = splitmix64(seed, draws).bitwise_and(2**63 - 1) % below
        found = list(dict.fromkeys(numbers.tolist()))
        if len(found) >= count:
            return found[:count]


def held_here(parameter: Any, places: Tensor) -> Tensor:
    """Return where in this rank's flattened shard of a DTensor those elements lie, of ``places``, that it holds.

    ``places`` are ascending places in the whole parameter. Takes, for as long as it runs, memory for one integer per
    element of the whole parameter.
    """
    numbered = torch.arange(parameter.numel(), dtype=places.dtype, device=parameter.device).view(parameter.shape)
    mine = local_shards([laid_out_like(numbered, parameter)])[0].flatten()
    wanted = places.to(mine.device)
    found = torch.searchsorted(mine, wanted)
    inside = found < len(mine)
    found, wanted = found[inside], wanted[inside]
    return found[mine[found] == wanted].to(places.dtype)
