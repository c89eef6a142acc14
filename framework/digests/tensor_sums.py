"""Two sums modulo 2**64 over the bytes of a tensor, each byte weighted by its place: those of its parts add up to them.

The bytes of the whole tensor, row by row and read as signed numbers, are cut into blocks of 1024 and the blocks into
chunks of 2048. With the byte ``x[c, b, k]`` in place ``k`` of block ``b`` of chunk ``c``,

    y[c, b, j] = sum over k of x[c, b, k] * R[k, j]                         exactly, for 16 columns j
    S[i] = sum over c, b, j of y[c, b, j] * P[i, b, j] * Q[i, c]            modulo 2**64, for i = 0, 1

``R`` are signed bytes, ``P`` and ``Q`` numbers of 64 bits, all read from SHAKE-256 and therefore without any structure
that training could share. Most of the work, the product with ``R``, is one that processors have instructions for, and
it is exact in float32, too: no ``y`` is beyond 2**24. A byte that is zero adds nothing, so that a part of a tensor is
the whole with zeros elsewhere.

A change of a tensor leaves a column as it was for at most one in 256 choices of ``R``, all 16 for one in 2**128. Else
some ``y`` changes by a number that 2**t divides and 2**(t + 1) does not, and a sum stays for one choice of ``P`` in
2**(64 - t). Where bits flip t is at most 7, or more if all 16 columns agree on each further power. Both sums stay for
less than one choice in 2**100 (multilinear hashing: Lemire and Kaser, arXiv:1202.4961). That holds for changes that do
not aim at these constants, which everybody can read: faults are seen, forgeries need not be.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from hashlib import shake_256
from math import prod

import torch
from torch import Tensor
from torch.nn import functional

from ..state import in_bytes

ALGORITHM = "loopscope-1"
"""The name of formula and constants; a record names it, and others are not compared with it."""
BLOCK, CHUNK, COLUMNS = 1024, 2048, 16
_CHUNK_BYTES = CHUNK * BLOCK
_SLAB_BYTES = 1 << 22
"""How much of a whole tensor is filled with zeros at once around a part that is scattered over it."""


@torch.no_grad()
def sums(
    tensor: Tensor, offsets: Sequence[int] = (), shape: Sequence[int] | None = None, *, at_once: int = 0
) -> Tensor:
    """Return both sums over a strided tensor, shape (2,), int64, on its device (the host for devices but CUDA's).

    Args:
        tensor: a whole tensor, or a part of one; its strides do not count.
        offsets: where in the whole the part begins, an index for each dimension.
        shape: the shape of the whole, by default that of ``tensor``.
        at_once: how many chunks to take in one piece: by default one on a CPU, where it stays in the cache, or 64.
    """
    plain = tensor.detach().resolve_conj().resolve_neg()
    plain = plain.int_repr() if plain.is_quantized else plain
    plain = plain if plain.device.type in ("cpu", "cuda") else plain.cpu()
    total = torch.zeros(2, dtype=torch.int64, device=plain.device)
    at_once = at_once or (1 if plain.device.type == "cpu" else 64)
    whole = tuple(plain.shape if shape is None else shape)
    for start, run in _runs(plain, offsets or [0] * plain.dim(), whole):
        for first, blocks in _blocks(run, start, at_once):
            total += _weighted(blocks, first)
    return total


def _runs(part: Tensor, offsets: Sequence[int], whole: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
    """Yield bytes that are neighbours in the whole tensor too, each time with the place of the first one there."""
    if not part.numel():
        return
    row = prod(whole[1:])
    start = offsets[0] * row * part.itemsize if whole else 0
    if tuple(part.shape[1:]) == tuple(whole[1:]):
        yield start, in_bytes(part, torch.int8)
        return
    inside = tuple(slice(offset, offset + size) for offset, size in zip(offsets[1:], part.shape[1:], strict=True))
    for rows in torch.split(part, max(1, _SLAB_BYTES // (row * part.itemsize))):
        slab = part.new_zeros((len(rows), *whole[1:]))
        slab[(slice(None), *inside)] = rows
        yield start, slab.reshape(-1).view(torch.int8)
        start += slab.nbytes


def _blocks(run: Tensor, start: int, at_once: int) -> Iterator[tuple[int, Tensor]]:
    """Yield blocks, shape (count, BLOCK), filled up with zeros at both ends, with the number of the first."""
    while size := run.numel():
        lead, room = start % BLOCK, _CHUNK_BYTES - start % _CHUNK_BYTES
        if lead or size < BLOCK:
            run, piece = run[BLOCK - lead :], run[: BLOCK - lead]
            blocks = functional.pad(piece, (lead, BLOCK - lead - piece.numel()))
        else:
            if room == _CHUNK_BYTES:
                room *= max(1, min(at_once, size // room))
            taken = min(room, size // BLOCK * BLOCK)
            run, blocks = run[taken:], run[:taken]
        yield start // BLOCK, blocks.view(-1, BLOCK)
        start += blocks.numel() - lead


def _weighted(blocks: Tensor, first: int) -> Tensor:
    """Return both sums over blocks within one chunk, or over whole chunks."""
    chunk, block = divmod(first, CHUNK)
    count = min(len(blocks), CHUNK)
    device = blocks.device
    weights = _constants(device)[1][:, block * COLUMNS : (block + count) * COLUMNS]
    columns = _projected(blocks).to(torch.int64).view(-1, count * COLUMNS)
    if len(columns) == 1 and device.type == "cpu":  # CUDA multiplies no matrices of int64
        return torch.mv(weights, columns[0]).mul_(_of_chunk(chunk, device))
    of_chunks = torch.stack([_of_chunk(chunk + index, device) for index in range(len(columns))], 1)
    return ((weights[:, None] * columns).sum(-1) * of_chunks).sum(-1)


def _projected(blocks: Tensor) -> Tensor:
    """Return the product of bytes with ``R``, whole numbers of shape (count, COLUMNS)."""
    projection, device, count = _constants(blocks.device)[0], blocks.device.type, len(blocks)
    if device == "cuda":  # which takes 17 rows or more, aligned
        blocks = functional.pad(blocks, (0, 0, 0, max(0, 17 - count)))
        blocks = blocks if blocks.data_ptr() % 16 == 0 else blocks.clone()
    # Private, as torch has no public product of bytes; without these instructions it is a slow loop.
    if device == "cuda" or torch.cpu._is_vnni_supported():
        if device == "cpu" and blocks.storage_offset() % 8 == 0:
            blocks.view(torch.int64).sum()  # fetched at the speed of memory, which the product is not: a fifth is saved
        return torch._int_mm(blocks, projection)[:count]
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
