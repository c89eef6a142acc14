"""SplitMix64: random numbers that are equal in every run and on every machine, independent of torch's generators."""

import torch
from torch import Tensor

GOLDEN, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def splitmix64(seed: int, count: int, *, skip: int = 0) -> Tensor:
    """Return numbers ``skip`` + 1 to ``skip`` + ``count`` of SplitMix64 (Steele, Lea and Flood 2014) as int64 bits."""
    # int64 products and sums wrap modulo 2⁶⁴, with the same bits as the uint64 of the reference.
    numbers = torch.arange(skip + 1, skip + count + 1) * _signed(GOLDEN) + _signed(seed)
    numbers = (numbers ^ _shifted(numbers, 30)) * _signed(FIRST)
    numbers = (numbers ^ _shifted(numbers, 27)) * _signed(SECOND)
    return numbers ^ _shifted(numbers, 31)


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


def _shifted(numbers: Tensor, bits: int) -> Tensor:
    """Shift to the right and fill with zeros.

    torch shifts int64 arithmetically, and has no shift for uint64; the mask clears the copies of the sign bit.
    """
    return (numbers >> bits).bitwise_and(2 ** (64 - bits) - 1)
