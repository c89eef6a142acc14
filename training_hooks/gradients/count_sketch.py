"""A random projection that keeps the inner products of long vectors, by a hash instead of a stored matrix."""

import torch
from loopscope.errors import UsageError
from torch import Tensor

CHUNK = 2**18
SMALLEST = 64


def check_dimensions(option: str, dimensions: int) -> None:
    """Refuse a number of dimensions that a sketch cannot have; 0 stands for no sketch."""
    if dimensions and (dimensions < SMALLEST or dimensions & (dimensions - 1)):
        raise UsageError(
            f"{option} is {dimensions}; it must be 0 (no projection) or a power of two of at least {SMALLEST}, "
            "such as 16384."
        )


@torch.no_grad()
def count_sketch(vector: Tensor, dimensions: int, key: int = 0) -> Tensor:
    """Return y of shape (d,), float32: y_b = Σ s_i x_i over the elements i whose bucket is b.

    Bucket b and sign s of every element are a hash of its place and of ``key``: the same in every run and on every
    machine. Inner products are kept in expectation, with variance at most (‖x‖²‖y‖² + (x·y)²)/d (Charikar, Chen and
    Farach-Colton 2002). Besides y it takes memory for a few chunks of 2¹⁸ elements, and time linear in the elements,
    whatever d is. On CUDA the elements of a bucket are added in no fixed order unless torch is told to be
    deterministic.

    Args:
        vector: shape (n,).
        dimensions: d, a power of two.
        key: chooses one projection of the family.
    """
    sketch = torch.zeros(dimensions, device=vector.device)
    places = torch.arange(min(CHUNK, len(vector)), dtype=torch.int32, device=vector.device)
    for number, start in enumerate(range(0, len(vector), CHUNK)):
        part = vector[start : start + CHUNK].float().contiguous()
        hashed = _hashed(places[: len(part)], *_chunk_keys(key, number))
        signed = (part.view(torch.int32) ^ (hashed & SIGN)).view(torch.float32)
        sketch.index_add_(0, hashed & (dimensions - 1), signed)
    return sketch


SIGN = -(2**31)
"""The bit of a float32 that holds its sign, as an int32."""


def _hashed(places: Tensor, multiplier: int, offset: int) -> Tensor:
    """Hash int32 places: an affine map, then the finaliser of MurmurHash3, modulo 2³²."""
    hashed = places * multiplier
    hashed += offset
    hashed ^= (hashed >> 16) & 0xFFFF
    hashed *= _signed(0x85EBCA6B)
    hashed ^= (hashed >> 13) & 0x7FFFF
    hashed *= _signed(0xC2B2AE35)
    hashed ^= (hashed >> 16) & 0xFFFF
    return hashed


def _chunk_keys(key: int, number: int) -> tuple[int, int]:
    """Return an odd multiplier and an offset for one chunk: two outputs of SplitMix64, cut to 32 bits."""
    seed = (key << 40) + 2 * number
    return _signed(_split_mix(seed) | 1), _signed(_split_mix(seed + 1))


def _split_mix(seed: int) -> int:
    mask = 2**64 - 1
    mixed = (seed + 1) * 0x9E3779B97F4A7C15 & mask
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & mask
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & mask
    return (mixed ^ mixed >> 31) & 0xFFFFFFFF


def _signed(value: int) -> int:
    """Return the int32 with the bits of the lowest 32 of ``value``."""
    return (value & 0xFFFFFFFF ^ 2**31) - 2**31
