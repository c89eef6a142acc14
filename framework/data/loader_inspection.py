"""Loaders around another one, with copies of its batches or one rank's rows, and inspection that restores its state."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from ..errors import InvalidExperimentError
from ..state import Structure, copy_of_batch
from ..state.settings import script_settings
from .batches import part_of, rows
from .generators import all_holders, attributes
from .loaders import Batch, Loader, SourceOfRows

_NO_BATCH = object()


class CopyingLoader(Loader):
    """The loader that hooks receive; it yields copies, since batches may be views of the data."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Yield copies of the loader's batches, which it reads with the settings of the script."""
        with script_settings():
            batches = iter(self._loader.batches(epoch, start))
        while True:
            with script_settings():
                batch = next(batches, _NO_BATCH)
            if batch is _NO_BATCH:
                return
            yield copy_of_batch(batch)

    def row_indices(self, epoch: int, start: int = 0) -> Iterator[Tensor] | None:
        """Return the numbers of the rows of the loader's batches."""
        return self._loader.row_indices(epoch, start) if isinstance(self._loader, Loader) else None

    def source_of_rows(self) -> SourceOfRows:
        """Return the source of the loader's rows."""
        return self._loader.source_of_rows() if isinstance(self._loader, Loader) else SourceOfRows()

    @property
    def copies(self) -> bool:
        """Whether every batch has its own memory."""
        return True

    def __len__(self) -> int:
        return len(self._loader)

    def steps_until(self, epoch: int) -> int:
        """Return the planned number of steps before ``epoch`` starts."""
        is_loader = isinstance(self._loader, Loader)
        return self._loader.steps_until(epoch) if is_loader else super().steps_until(epoch)

    def shuffled(self, seed: int) -> Loader:
        """Return the same data in another order, also as copies."""
        return with_copied_batches(self._loader.shuffled(seed))

    def drawn(self, seed: int) -> Loader:
        """Return the same data in an order that depends only on ``seed``, also as copies."""
        return with_copied_batches(self._loader.drawn(seed))

    def generators(self) -> tuple[torch.Generator, ...]:
        """Return the random generators of the loader."""
        return self._loader.generators()

    def __getattr__(self, name: str) -> Any:
        """Return other attributes of a custom loader."""
        return getattr(self._loader, name)


def with_copied_batches(loader: Loader) -> Loader:
    """Return a loader whose batches can be written to without changing the data."""
    return loader if isinstance(loader, Loader) and loader.copies else CopyingLoader(loader)


@contextmanager
def preserved_loader(loader: Loader) -> Iterator[None]:
    """Restore the state of a loader after the body: a loader may count the batches it has yielded."""
    structure = Structure(map(attributes, all_holders(loader, kinds=(Loader, Dataset, DataLoader, Sampler))))
    # Arrays are data, not a position.
    structure.natives = [native for native in structure.natives if not isinstance(native, np.ndarray)]
    states = structure.read_natives()
    try:
        yield
    finally:
        structure.restore()
        structure.write_natives(states)


def first_batch(loader: Loader) -> Batch:
    """Return the first batch of a run, and restore the state of the loader."""
    with preserved_loader(loader):
        return next(iter(loader.batches(0)))


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
