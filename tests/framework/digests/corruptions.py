"""Faults that change the bytes of tensors, and how often several kinds of sums miss them."""

from collections.abc import Callable
from typing import Any

import torch
from loopscope.digests import sums
from torch import Tensor

SIZE = 12


def flip(tensor: Tensor, *places: int, bit: int) -> Tensor:
    bits = tensor.clone().view(torch.int32).view(-1)
    bits[list(places)] ^= -(2**31) if bit == 31 else 1 << bit
    return bits.view(torch.float32).view_as(tensor)


def two(count: int) -> list[int]:
    return torch.randperm(count)[:2].tolist()


def any_bit() -> int:
    return int(torch.randint(32, ()))


def one_bit(tensor: Tensor) -> Tensor:
    return flip(tensor, two(tensor.numel())[0], bit=any_bit())


def one_bit_twice(tensor: Tensor) -> Tensor:
    return flip(tensor, *two(tensor.numel()), bit=any_bit())


def two_bits(tensor: Tensor) -> Tensor:
    first, second = two(tensor.numel())
    return flip(flip(tensor, first, bit=any_bit()), second, bit=any_bit())


def swapped(tensor: Tensor) -> Tensor:
    other, places = tensor.clone(), two(tensor.numel())
    other.view(-1)[places] = tensor.view(-1)[places[::-1]]
    return other


def permuted_rows(tensor: Tensor) -> Tensor:
    order = torch.randperm(len(tensor))
    return tensor[order if order.tolist() != sorted(order.tolist()) else order.flip(0)]


def transposed(tensor: Tensor) -> Tensor:
    return tensor.t().clone()


def swapped_shards(tensor: Tensor) -> Tensor:
    return tensor.roll(len(tensor) // 2, 0)


def sign_pair(tensor: Tensor) -> Tensor:
    """Exchange the signs of two numbers that are equal but for them."""
    first, second = two(tensor.numel())
    tensor.view(-1)[second] = -tensor.view(-1)[first]
    return flip(tensor, first, second, bit=31)


def rows_overwritten(tensor: Tensor) -> Tensor:
    """Write the same into two rows that were alike, as rows of an embedding that is not trained are."""
    rows = two(len(tensor))
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
    found = dict.fromkeys(MEASURES, 0)
    for _ in range(trials):
        tensor = torch.randn(SIZE, SIZE)
        other = CORRUPTIONS[corruption](tensor)  # which may prepare the tensor
        for name, measure in MEASURES.items():
            before, after = measure(tensor), measure(other)
            found[name] += before == after or (before != before and after != after)
    return found
