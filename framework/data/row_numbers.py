"""Row numbers of the steps of a run, read from its loader batch by batch."""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from .loaders import Loader


class RowNumbers:
    """The row numbers of any batch of a loader; consecutive batches need no restart of the epoch."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._epoch, self._next = -1, 0
        self._upcoming: Iterator[Tensor] | None = None
        self._newest: Tensor | None = None
        self._cached: dict[int, tuple[int, Sequence[Tensor]]] = {}

    def cache_rows(self, epoch: int, start: int, batches: Sequence[Tensor]) -> None:
        """Cache the rows of an epoch's batches from batch ``start`` on."""
        self._cached[epoch] = start, batches

    def of_step(self, step: int) -> Tensor | None:
        """Return the rows of a step of the run, counted from 1, or ``None``."""
        return self.of(*divmod(step - 1, len(self._loader)))

    def of_steps(self, since: int, until: int) -> Tensor | None:
        """Return the concatenated rows of the steps after ``since`` up to ``until``; ``None`` unless all are known."""
        batches = [self._find(*divmod(step, len(self._loader))) for step in range(since, until)]
        known_rows = [rows for rows in batches if rows is not None]
        for epoch in [epoch for epoch in self._cached if (epoch + 1) * len(self._loader) <= until]:
            del self._cached[epoch]
        return torch.cat(known_rows) if known_rows and len(known_rows) == len(batches) else None

    def of(self, epoch: int, batch: int) -> Tensor | None:
        """Return a copy of the row numbers of a batch; ``None`` if rows have no numbers."""
        rows = self._find(epoch, batch)
        return None if rows is None else rows.clone()

    def _find(self, epoch: int, batch: int) -> Tensor | None:
        start, batches = self._cached.get(epoch, (0, ()))
        if start <= batch < start + len(batches):
            return batches[batch - start]
        if epoch != self._epoch or batch < self._next - 1:
            is_loader = isinstance(self._loader, Loader)  # any iterable of batches may be used instead
            self._upcoming = self._loader.row_indices(epoch, batch) if is_loader else None
            self._epoch, self._next = epoch, batch
        if self._upcoming is not None and batch >= self._next:
            upcoming = self._upcoming if batch == self._next else islice(self._upcoming, batch - self._next, None)
            self._newest = next(upcoming, None)
            self._next = batch + 1
        return None if self._upcoming is None else self._newest
