"""The rows of each batch, spread over the ranks that train together."""

from collections.abc import Iterator

from torch import Tensor

from ..errors import UnfitError
from .batches import part_of, rows
from .loader_inspection import CopyingLoader
from .loaders import Batch, Loader


class RowsOfRank(CopyingLoader):
    """A loader's batches with the rows of one rank only: all ranks together have the batches of one process.

    Args:
        loader: the batches of one process.
        rank: which share, from 0 on.
        count: into how many shares the rows of a batch are cut, one after another, as equally as may be.
    """

    def __init__(self, loader: Loader, rank: int, count: int) -> None:
        super().__init__(loader)
        self._rank, self._count = rank, count

    def batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Yield this rank's rows of each batch; raises :class:`UnfitError` for a batch with fewer rows than ranks."""
        for batch in self._loader.batches(epoch, start):
            whole = rows(batch)
            if whole < self._count:
                raise UnfitError(
                    f"A batch of epoch {epoch} has {whole} rows, too few for each of {self._count} ranks to have one; "
                    "choose a batch_size that leaves more rows to the last batch, or start fewer processes."
                )
            yield part_of(batch, self._share(whole))

    def row_indices(self, epoch: int, start: int = 0) -> Iterator[Tensor] | None:
        """Return the numbers of this rank's rows of each batch."""
        found = super().row_indices(epoch, start)
        return None if found is None else (each[self._share(len(each))] for each in found)

    def _share(self, whole: int) -> slice:
        return slice(whole * self._rank // self._count, whole * (self._rank + 1) // self._count)

    @property
    def copies(self) -> bool:
        """Whether every batch lies in memory of its own."""
        return self._loader.copies

    def shuffled(self, seed: int) -> Loader:
        """Return the same data in another order, in the same shares."""
        return RowsOfRank(self._loader.shuffled(seed), self._rank, self._count)

    def drawn(self, seed: int) -> Loader:
        """Return the same data in the order of ``seed`` alone, in the same shares."""
        return RowsOfRank(self._loader.drawn(seed), self._rank, self._count)


def global_batches(loader: Loader) -> Loader:
    """Return a loader of the batches that all ranks have together."""
    return loader._loader if isinstance(loader, RowsOfRank) else loader
