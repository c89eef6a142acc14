"""Two position-weighted sums modulo 2**64 over the bytes of a tensor; the sums of its shards add up to them.

The bytes of the full tensor, in row-major order and as signed numbers, are split into blocks of 1024 bytes, and the
blocks into chunks of 2048 blocks. With the byte ``x[c, b, k]`` at position ``k`` of block ``b`` of chunk ``c``,

    y[c, b, j] = sum over k of x[c, b, k] * R[k, j]                         exactly, for 16 columns j
    S[i] = sum over c, b, j of y[c, b, j] * P[i, b, j] * Q[i, c]            modulo 2**64, for i = 0, 1

``R`` consists of signed bytes, ``P`` and ``Q`` of 64-bit numbers, all from SHAKE-256 and therefore unrelated to any
structure in training. Most of the work is the product with ``R``, for which processors have instructions; it is also
exact in float32, since ``abs(y) <= 2**24``. Zero bytes add nothing, so a shard counts like the full tensor with zeros
elsewhere.

The probabilities are those over random ``R`` and ``P``. A changed block leaves one column of ``y`` unchanged with
probability at most 2**-8, and all 16 with at most 2**-128. Otherwise some ``y`` changes by a number that is divisible
by 2**t but not by 2**(t + 1), and one sum then stays equal with probability 2**(t - 64). For flipped bits, t is at most
7, unless the changes of all 16 columns are divisible by a higher power of two. Both sums stay equal with a probability
below 2**-100 (multilinear hashing: Lemire and Kaser, arXiv:1202.4961). This holds for accidental changes. The constants
are public, so deliberate forgeries may not be detected.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from hashlib import shake_256
from math import prod

import torch
from torch import Tensor
from torch.nn import functional

from ..tensors import in_bytes

ALGORITHM = "loopscope-1"
"""Name of the formula and its constants; only digests with the same name in the record are compared."""
BLOCK, CHUNK, COLUMNS = 1024, 2048, 16
_CHUNK_BYTES = CHUNK * BLOCK
_SLAB_BYTES = 1 << 22
"""Bytes of a full tensor that are processed at once if a shard is not contiguous in it."""


@torch.no_grad()
def sums(
    tensor: Tensor, offsets: Sequence[int] = (), shape: Sequence[int] | None = None, *, at_once: int = 0
) -> Tensor:
    """Return both sums over a strided tensor: int64, shape (2,), on its device (on the host unless that is CUDA).

    Args:
        tensor: a full tensor or a shard; its strides do not matter.
        offsets: start of the shard in the full tensor, one index per dimension.
        shape: shape of the full tensor, by default that of ``tensor``.
        at_once: number of chunks per operation: by default 1 on a CPU, where it fits the cache, and 64 otherwise.
    """
    plain = tensor.detach().resolve_conj().resolve_neg()
    plain = plain.int_repr() if plain.is_quantized else plain
    plain = plain if plain.device.type in ("cpu", "cuda") else plain.cpu()
    total = torch.zeros(2, dtype=torch.int64, device=plain.device)
    at_once = at_once or (1 if plain.device.type == "cpu" else 64)
    full_shape = tuple(plain.shape if shape is None else shape)
    for start, run in _runs(plain, offsets or [0] * plain.dim(), full_shape):
        for first, blocks in _blocks(run, start, at_once):
            total += _weighted(blocks, first)
    return total


def _runs(part: Tensor, offsets: Sequence[int], full_shape: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
    """Yield runs of bytes that are contiguous in the full tensor, each with the position of its first byte."""
    if not part.numel():
        return
    row = prod(full_shape[1:])
    # position of the first byte = (index of the first row) * (elements per row) * (bytes per element)
    start = offsets[0] * row * part.itemsize if full_shape else 0
    if tuple(part.shape[1:]) == tuple(full_shape[1:]):
        yield start, in_bytes(part, torch.int8)
        return
    # The shard has only parts of the rows: they are embedded in complete rows of zeros, which add nothing.
    inside = tuple(slice(offset, offset + size) for offset, size in zip(offsets[1:], part.shape[1:], strict=True))
    for rows in torch.split(part, max(1, _SLAB_BYTES // (row * part.itemsize))):
        slab = part.new_zeros((len(rows), *full_shape[1:]))
        slab[(slice(None), *inside)] = rows
        yield start, slab.reshape(-1).view(torch.int8)
        start += slab.nbytes


def _blocks(run: Tensor, start: int, at_once: int) -> Iterator[tuple[int, Tensor]]:
    """Yield blocks, shape (count, BLOCK), padded with zeros at both ends, with the number of the first block."""
    while size := run.numel():
        lead, room = start % BLOCK, _CHUNK_BYTES - start % _CHUNK_BYTES
        if lead or size < BLOCK:
            run, piece = run[BLOCK - lead :], run[: BLOCK - lead]
            blocks = functional.pad(piece, (lead, BLOCK - lead - piece.numel()))
        else:
            # Either the rest of one chunk or several complete chunks, since Q differs from chunk to chunk.
            if room == _CHUNK_BYTES:
                room *= max(1, min(at_once, size // room))
            taken = min(room, size // BLOCK * BLOCK)
            run, blocks = run[taken:], run[:taken]
        yield start // BLOCK, blocks.view(-1, BLOCK)
        start += blocks.numel() - lead


def _weighted(blocks: Tensor, first: int) -> Tensor:
    """Return both sums over blocks of one chunk, or over complete chunks."""
    chunk, block = divmod(first, CHUNK)
    count = min(len(blocks), CHUNK)
    device = blocks.device
    # weights: P[i, b, j] of these blocks, shape (2, count * COLUMNS); columns: y[c, b, j], (chunks, count * COLUMNS)
    weights = _constants(device)[1][:, block * COLUMNS : (block + count) * COLUMNS]
    columns = _projected(blocks).to(torch.int64).view(-1, count * COLUMNS)
    # S[i] = sum over c of Q[i, c] * sum over b, j of P[i, b, j] * y[c, b, j]; int64 wraps around, so modulo 2**64
    if len(columns) == 1 and device.type == "cpu":  # CUDA has no int64 matrix product
        return torch.mv(weights, columns[0]).mul_(_of_chunk(chunk, device))
    of_chunks = torch.stack([_of_chunk(chunk + index, device) for index in range(len(columns))], 1)
    # (2, 1, count * COLUMNS) * (chunks, count * COLUMNS), summed: (2, chunks); times Q, (2, chunks), summed: (2,)
    return ((weights[:, None] * columns).sum(-1) * of_chunks).sum(-1)


def _projected(blocks: Tensor) -> Tensor:
    """Return the product of bytes with ``R``: integers of shape (count, COLUMNS)."""
    # y[b, j] = sum over k of x[b, k] * R[k, j]: (count, BLOCK) @ (BLOCK, COLUMNS) -> (count, COLUMNS)
    projection, device, count = _constants(blocks.device)[0], blocks.device.type, len(blocks)
    if device == "cuda":  # _int_mm on CUDA needs at least 17 rows and alignment
        blocks = functional.pad(blocks, (0, 0, 0, max(0, 17 - count)))
        blocks = blocks if blocks.data_ptr() % 16 == 0 else blocks.clone()
    # Private, since torch has no public product of bytes; on a CPU without VNNI instructions it is a slow loop.
    if device == "cuda" or torch.cpu._is_vnni_supported():
        if device == "cpu" and blocks.storage_offset() % 8 == 0:
            # This sum prefetches at full memory bandwidth, which the product does not reach: a fifth less time.
            blocks.view(torch.int64).sum()
        return torch._int_mm(blocks, projection)[:count]
    # In this way, a digest takes 13 times as long as reading the bytes (2026).
    # float32 is exact, since BLOCK * 128 * 128 = 2**24; autocast would compute in a shorter dtype.
    with torch.autocast(device, enabled=False):
        wide = projection.float()
        return torch.cat([few.float() @ wide for few in torch.split(blocks, 128)])


@lru_cache(maxsize=8)
def _constants(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return ``R``, shape (BLOCK, COLUMNS), and ``P``, shape (2, CHUNK * COLUMNS)."""
    projection = _stream("R", BLOCK * COLUMNS, torch.int8).view(BLOCK, COLUMNS)
    return projection.to(device), _stream("P", 16 * CHUNK * COLUMNS, torch.int64).view(2, -1).to(device)


@lru_cache(maxsize=1 << 16)
def _of_chunk(chunk: int, device: torch.device) -> Tensor:
    """Return ``Q`` of a chunk, shape (2,)."""
    return _stream(f"Q {chunk}", 16, torch.int64).to(device)


def _stream(name: str, count: int, dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(bytearray(shake_256(f"{ALGORITHM} {name}".encode()).digest(count)), dtype=dtype)
