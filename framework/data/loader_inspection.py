"""Inspection of a loader without side effects: batches as copies, and the loader's state restored."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from ..state import Structure, copy_of_batch
from ..state.settings import script_settings
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
