"""Digests of tensors on an accelerator, computed there, since a copy to the host would be far slower.

The bytes of a tensor, in row-major order and padded with zeros, are read as signed 32-bit numbers ``x[c, k]``, with
``c`` the number of a chunk and ``k`` the position in it. With the 64-bit constants ``P`` and ``Q`` from SHAKE-256,

    S[i] = sum over c of Q[i, c] * sum over k of P[i, k] * x[c, k]          modulo 2**64, for i = 0, 1

Two numbers of 32 bits differ by a multiple of at most 2**31, so each sum stays equal by chance with a probability of at
most 2**-33, and both with 2**-66 (multilinear hashing: Lemire and Kaser, arXiv:1202.4961). That detects accidental
changes, which is what digests within one process are for.
"""

from functools import lru_cache
from hashlib import shake_256

import torch
from torch import Tensor

from .storage import PLAIN, in_bytes, is_cut_off

CHUNK = 1 << 16
AT_ONCE = 64
"""Number of chunks per operation, whose intermediate results take 32 MiB."""


def has_device_sums(tensor: Tensor) -> bool:
    """Return whether the bytes of a tensor are on an accelerator and can be read there as numbers."""
    return (
        type(tensor) in PLAIN
        and tensor.device.type not in ("cpu", "meta")
        and tensor.layout is torch.strided
        and not tensor.is_quantized
        and not is_cut_off(tensor)
    )


@torch.no_grad()
def device_sums(tensor: Tensor) -> Tensor:
    """Return both sums over the bytes of a strided tensor, int64 of shape (2,), on its device, without waiting for it.

    Raises:
        RuntimeError, TypeError: if the device has no arithmetic of 64-bit integers.
    """
    numbers = _as_numbers(in_bytes(tensor.detach().resolve_conj().resolve_neg()))
    of_position, of_chunk = _constants(tensor.device)
    total = torch.zeros(2, dtype=torch.int64, device=tensor.device)
    whole = len(numbers) // CHUNK * CHUNK
    for start in range(0, whole, CHUNK * AT_ONCE):
        chunks = numbers[start : min(start + CHUNK * AT_ONCE, whole)].view(-1, CHUNK)
        total += _weighted(chunks, start // CHUNK, of_position, of_chunk)
    if whole < len(numbers):
        total += _weighted(numbers[None, whole:], whole // CHUNK, of_position, of_chunk)
    return total


def _as_numbers(raw: Tensor) -> Tensor:
    """Return bytes as 32-bit numbers; a view if length and address are multiples of four."""
    size = len(raw)
    if size % 4 or raw.storage_offset() % 4:
        padded = raw.new_zeros(-(-size // 4) * 4)
        padded[:size] = raw
        raw = padded
    return raw.view(torch.int32)


def _weighted(chunks: Tensor, first: int, of_position: Tensor, of_chunk: Tensor) -> Tensor:
    """Return both sums over chunks, shape (count, length), of which the first one has the number ``first``."""
    wide = chunks.to(torch.int64)
    # P[i, k] * x[c, k], summed over k: (2, count); CUDA has no int64 matrix product
    sums = torch.stack([(wide * weights).sum(-1) for weights in of_position[:, : wide.shape[1]]])
    # Q repeats after 2**16 chunks (16 GiB), then with an odd factor, which keeps it different from earlier ones.
    rounds, place = divmod(first, CHUNK)
    factors = of_chunk[:, place : place + len(chunks)] * (2 * rounds + 1)
    return (sums * factors).sum(-1)


@lru_cache(maxsize=8)
def _constants(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return ``P`` and ``Q``, each of shape (2, CHUNK), after one transfer to the device."""
    content = bytearray(shake_256(b"loopscope device sums").digest(4 * CHUNK * 8))
    constants = torch.frombuffer(content, dtype=torch.int64).view(2, 2, CHUNK).to(device)
    return constants[0], constants[1]
