"""Faults that change the bytes of tensors, and the count of those that each checksum misses."""

from collections.abc import Callable
from typing import Any

import torch
from loopscope.digests import sums
from torch import Tensor

SIZE = 12


def flip(tensor: Tensor, *positions: int, bit: int) -> Tensor:
    bits = tensor.clone().view(torch.int32).view(-1)
    bits[list(positions)] ^= -(2**31) if bit == 31 else 1 << bit
    return bits.view(torch.float32).view_as(tensor)


def two_positions(count: int) -> list[int]:
    return torch.randperm(count)[:2].tolist()


def any_bit() -> int:
    return int(torch.randint(32, ()))


def one_bit(tensor: Tensor) -> Tensor:
    return flip(tensor, two_positions(tensor.numel())[0], bit=any_bit())


def one_bit_twice(tensor: Tensor) -> Tensor:
    return flip(tensor, *two_positions(tensor.numel()), bit=any_bit())


def two_bits(tensor: Tensor) -> Tensor:
    first, second = two_positions(tensor.numel())
    return flip(flip(tensor, first, bit=any_bit()), second, bit=any_bit())


def swapped(tensor: Tensor) -> Tensor:
    other, positions = tensor.clone(), two_positions(tensor.numel())
    other.view(-1)[positions] = tensor.view(-1)[positions[::-1]]
    return other


def permuted_rows(tensor: Tensor) -> Tensor:
    order = torch.randperm(len(tensor))
    return tensor[order if order.tolist() != sorted(order.tolist()) else order.flip(0)]


def transposed(tensor: Tensor) -> Tensor:
    return tensor.t().clone()


def swapped_shards(tensor: Tensor) -> Tensor:
    return tensor.roll(len(tensor) // 2, 0)


def sign_pair(tensor: Tensor) -> Tensor:
    """Make two elements differ only in sign, and exchange their signs."""
    first, second = two_positions(tensor.numel())
    tensor.view(-1)[second] = -tensor.view(-1)[first]
    return flip(tensor, first, second, bit=31)


def rows_overwritten(tensor: Tensor) -> Tensor:
    """Overwrite two equal rows with the same values; untrained rows of an embedding can be equal."""
    rows = two_positions(len(tensor))
    tensor[rows] = 0
    other = tensor.clone()
    other[rows] = torch.randn(SIZE)
    return other


CORRUPTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "one bit flipped": one_bit,
    "two bits flipped": two_bits,
    "the same bit flipped at two places": one_bit_twice,
    "two elements swapped": swapped,
    "rows permuted": permuted_rows,
    "transposed": transposed,
    "two shards swapped": swapped_shards,
    "the signs of a and -a exchanged": sign_pair,
    "two equal rows overwritten alike": rows_overwritten,
}
MEASURES: dict[str, Callable[[Tensor], Any]] = {
    "loopscope-1": lambda tensor: sums(tensor).tolist(),
    "torch.hash_tensor": lambda tensor: torch.hash_tensor(tensor).item(),
    "a sum": lambda tensor: tensor.sum().item(),
    "a sum of squares": lambda tensor: tensor.square().sum().item(),
}


def missed(corruption: str, trials: int) -> dict[str, int]:
    """Return how often each measure is the same before and after a corruption of a random tensor."""
    counts = dict.fromkeys(MEASURES, 0)
    for _ in range(trials):
        tensor = torch.randn(SIZE, SIZE)
        other = CORRUPTIONS[corruption](tensor)  # may change the tensor first
        for name, measure in MEASURES.items():
            original, corrupted = measure(tensor), measure(other)
            both_nan = original != original and corrupted != corrupted
            counts[name] += original == corrupted or both_nan
    return counts
