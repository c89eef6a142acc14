"""The numbers of the rows that the steps of a run train on, read off its loader one batch after the other."""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from .loaders import Loader


class RowNumbers:
    """The rows of any batch of a loader; batches in their order are found without an epoch being begun anew."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._epoch, self._next = -1, 0
        self._upcoming: Iterator[Tensor] | None = None
        self._newest: Tensor | None = None
        self._cached: dict[int, tuple[int, Sequence[Tensor]]] = {}

    def cache_rows(self, epoch: int, start: int, batches: Sequence[Tensor]) -> None:
        """Take the rows of the batches of an epoch from ``start`` on, found already."""
        self._cached[epoch] = start, batches

    def of_step(self, step: int) -> Tensor | None:
        """Return the rows of a step of the run, counted from 1, or ``None``."""
        return self.of(*divmod(step - 1, len(self._loader)))

    def of_steps(self, since: int, until: int) -> Tensor | None:
        """Return the rows of the steps after ``since`` up to ``until``, one after another, if all are known."""
        found = [self._find(*divmod(step, len(self._loader))) for step in range(since, until)]
        known = [rows for rows in found if rows is not None]
        for epoch in [epoch for epoch in self._cached if (epoch + 1) * len(self._loader) <= until]:
            del self._cached[epoch]
        return torch.cat(known) if known and len(known) == len(found) else None

    def of(self, epoch: int, batch: int) -> Tensor | None:
        """Return the rows of a batch, its owner's to change; ``None`` where rows have no numbers."""
        found = self._find(epoch, batch)
        return None if found is None else found.clone()

    def _find(self, epoch: int, batch: int) -> Tensor | None:
        start, batches = self._cached.get(epoch, (0, ()))
        if start <= batch < start + len(batches):
            return batches[batch - start]
        if epoch != self._epoch or batch < self._next - 1:
            is_one = isinstance(self._loader, Loader)  # anything that yields batches may stand in its place
            self._upcoming = self._loader.row_indices(epoch, batch) if is_one else None
            self._epoch, self._next = epoch, batch
        if self._upcoming is not None and batch >= self._next:
            ahead = self._upcoming if batch == self._next else islice(self._upcoming, batch - self._next, None)
            self._newest = next(ahead, None)
            self._next = batch + 1
        return None if self._upcoming is None else self._newest
