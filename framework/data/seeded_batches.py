"""A dataset of whole batches, each fetched and collated on random streams seeded for it, in whatever process."""

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from torch.utils.data import Dataset, get_worker_info

from ..state import RandomStreams
from .generators import dataset_generators, seed_all, undisturbed


@runtime_checkable
class BatchedDataset(Protocol):
    """A dataset that fetches the items of a batch at once, as torch's ``Subset`` can."""

    def __getitems__(self, indices: list[Any]) -> list[Any]:
        """Return the items of ``indices``."""


class SeededBatches(Dataset[Any]):
    """The batches of a dataset, as functions of (seed, epoch, number of the batch, indices).

    The global generators of torch, Python and NumPy are seeded for a batch before its items are fetched, and so are
    those that the dataset holds itself, which are put back after it. The global ones are left to the caller.

    Args:
        dataset: whose items make up the batches.
        collate: makes a batch of a list of items, or of one item where there is no batching.
        streams: seed the generators.
        epoch: the batches' epoch.
        batched: whether an index is a list of them.
    """

    def __init__(
        self, dataset: Any, collate: Callable[[Any], Any], streams: RandomStreams, epoch: int, *, batched: bool
    ) -> None:
        self.dataset = dataset
        self._collate = collate
        self._streams = streams
        self._epoch = epoch
        self._batched = batched
        self._fetches_at_once = batched and isinstance(dataset, BatchedDataset)  # slow to ask

    def __getitem__(self, numbered: tuple[int, Any]) -> Any:
        """Return the batch with this number and these indices."""
        number, index = numbered
        self._streams.derive(f"loader/{self._epoch}", "batch", number)
        generators = dataset_generators(self.dataset)
        with undisturbed(generators):
            seed_all(generators)
            return self._collate(self._items(index))

    def _items(self, index: Any) -> Any:
        if not self._batched:
            return self.dataset[index]
        if self._fetches_at_once:
            return self.dataset.__getitems__(index)
        return [self.dataset[each] for each in index]


def as_it_is(batch: Any) -> Any:
    """Return a batch that is collated already."""
    return batch


def start_worker(init: Callable[[int], None] | None, worker: int) -> None:
    """Show the dataset itself in ``get_worker_info()``, then call the ``worker_init_fn`` of the DataLoader's owner.

    They know nothing of :class:`SeededBatches`.
    """
    info = get_worker_info()
    assert info is not None
    assert isinstance(info.dataset, SeededBatches)
    object.__setattr__(info, "dataset", info.dataset.dataset)  # frozen
    if init is not None:
        init(worker)
