"""Distribution of the rows of each batch over the data-parallel ranks."""

from collections.abc import Iterator

from torch import Tensor

from ..errors import InvalidExperimentError
from .batches import part_of, rows
from .loader_inspection import CopyingLoader
from .loaders import Batch, Loader


class RowsOfRank(CopyingLoader):
    """A loader of one rank's rows of each batch: all ranks together have the batches of a single process.

    Args:
        loader: the batches of a single process.
        rank: index of the share, from 0.
        count: number of shares into which the rows of a batch are split, consecutively and as equally as possible.
    """

    def __init__(self, loader: Loader, rank: int, count: int) -> None:
        super().__init__(loader)
        self._rank, self._count = rank, count

    def batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Yield this rank's rows of each batch.

        Raises:
            InvalidExperimentError: for a batch with fewer rows than ranks.
        """
        for batch in self._loader.batches(epoch, start):
            size = rows(batch)
            if size < self._count:
                raise InvalidExperimentError(
                    f"A batch of epoch {epoch} has {size} rows, too few for {self._count} ranks; choose a batch_size "
                    "that leaves more rows for the last batch, or start fewer processes."
                )
            yield part_of(batch, self._share(size))

    def row_indices(self, epoch: int, start: int = 0) -> Iterator[Tensor] | None:
        """Return the numbers of this rank's rows of each batch."""
        indices = super().row_indices(epoch, start)
        return None if indices is None else (batch[self._share(len(batch))] for batch in indices)

    def _share(self, size: int) -> slice:
        # rank r of n gets rows floor(size * r / n) to floor(size * (r + 1) / n), so sizes differ by at most one row
        return slice(size * self._rank // self._count, size * (self._rank + 1) // self._count)

    @property
    def copies(self) -> bool:
        """Whether every batch has its own memory."""
        return self._loader.copies

    def shuffled(self, seed: int) -> Loader:
        """Return the same data in another order, with the same shares."""
        return RowsOfRank(self._loader.shuffled(seed), self._rank, self._count)

    def drawn(self, seed: int) -> Loader:
        """Return the same data in an order that depends only on ``seed``, with the same shares."""
        return RowsOfRank(self._loader.drawn(seed), self._rank, self._count)


def global_batches(loader: Loader) -> Loader:
    """Return a loader of the global batches, which all ranks share."""
    return loader._loader if isinstance(loader, RowsOfRank) else loader
