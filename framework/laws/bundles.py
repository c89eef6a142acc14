"""Rows of a batch that belong together, such as two views of one picture."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MOST_MEMBERS = 4
LEAST_BUNDLES = 3
FEWEST = 4
"""Rows that may be two pairs, which too few orders show: a law on their order is not decided."""


@dataclass(frozen=True)
class Bundles:
    """The rows of a batch in bundles of equal size, whose members are in one place of each block, or side by side."""

    table: Tensor
    """The rows of each bundle, of shape (bundles, members)."""
    are_blocks: bool = False
    """Whether the first members of all bundles come first, then the second ones, and so on."""

    @classmethod
    def of_single_rows(cls, count: int) -> "Bundles":
        """Return bundles of one row each."""
        return cls(torch.arange(count)[:, None])

    @classmethod
    def candidates(cls, count: int) -> Iterator["Bundles"]:
        """Return all arrangements of ``count`` rows in bundles of a few members."""
        rows = torch.arange(count)
        for members in range(2, MOST_MEMBERS + 1):
            if count % members == 0 and (count // members >= LEAST_BUNDLES or (count, members) == (FEWEST, 2)):
                yield cls(rows.reshape(members, -1).T, are_blocks=True)
                yield cls(rows.reshape(-1, members))

    def __len__(self) -> int:
        """Return the number of bundles."""
        return len(self.table)

    @property
    def members(self) -> int:
        """The number of rows in a bundle."""
        return self.table.shape[1]

    def rows(self, order: Tensor) -> Tensor:
        """Return the rows of the bundles in another order, some perhaps repeated, in the arrangement of the batch."""
        chosen = self.table[order]
        return (chosen.T if self.are_blocks else chosen).flatten()

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the rows of several batches in the arrangement of one."""
        if not self.are_blocks:
            return torch.cat(list(parts))
        blocks = [part.chunk(self.members) for part in parts]
        return torch.cat([block for place in zip(*blocks, strict=True) for block in place])
