"""Tensors laid out in the blocks that share a scale, and back."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

SMALLEST_SHARE = 1 / 8
"""Of the size that is asked for, what a chunk must have."""


@dataclass(frozen=True)
class Layout:
    """The values of a tensor in blocks.

    Args:
        blocks: (n, b), the last block of a row filled up with zeros; or flat (n), if all values share one scale.
        shape: the tensor's own shape.
        per_row: blocks to a row of the tensor; ``None`` for one scale in all.
    """

    blocks: Tensor
    shape: torch.Size
    per_row: int | None

    @classmethod
    def of(cls, values: Tensor, block: int | None) -> "Layout":
        """Lay a tensor out, in blocks of ``block`` values of a row; a zero-dimensional tensor is a row of one."""
        if block is None:
            return cls(values.reshape(-1), values.shape, None)
        length = values.shape[-1] if values.ndim else 1
        missing = -length % block
        rows = values.reshape((*values.shape[:-1], length))
        padded = torch.nn.functional.pad(rows, (0, missing)) if missing else rows
        per_row = (length + missing) // block
        return cls(padded.reshape(padded.numel() // block, block), values.shape, per_row)

    def in_chunks(self, size: int) -> torch.Size | None:
        """Return a shape (n, g, b) of n chunks of at most ``size`` values; ``None`` if they would be many small ones.

        Of a tensor with one scale, pieces are the blocks, one to a chunk.
        """
        if self.per_row is None:
            group, block = 1, math.gcd(len(self.blocks), size)
        else:
            block = self.blocks.shape[-1]
            group = math.gcd(len(self.blocks), size // block)
        if group * block < SMALLEST_SHARE * size:
            return None
        return torch.Size((self.blocks.numel() // (group * block), group, block))

    def scales(self, flat: Tensor) -> Tensor:
        """Return scales (n) in the tensor's shape with blocks in place of the last dimension; or the one scale."""
        return flat if self.per_row is None else flat.reshape((*self.shape[:-1], self.per_row))

    def values(self, blocks: Tensor) -> Tensor:
        """Return values in blocks in the tensor's shape."""
        if self.per_row is None or blocks.numel() == self.shape.numel():
            return blocks.reshape(self.shape)
        rows = blocks.reshape(*self.shape[:-1], self.per_row * blocks.shape[-1])
        return rows[..., : self.shape[-1] if self.shape else 1].reshape(self.shape)
