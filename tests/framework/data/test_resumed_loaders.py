"""A DataLoader's batch depends only on (seed, epoch, batch), not on start, workers or earlier batches."""

import random
import time
from itertools import chain, islice

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loopscope.data import Loader, TensorLoader, TorchLoader, random_order
from loopscope.errors import UsageError
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)


class Noisy(Dataset):
    """Draws from every global generator, as augmentation does, and notes which rows are fetched."""

    def __init__(self, rows: int = 11):
        self.rows = rows
        self.fetched = []

    def __len__(self):
        return self.rows

    def __getitem__(self, index):
        if not 0 <= index < self.rows:
            raise IndexError(index)
        self.fetched.append(index)
        return torch.tensor([index, torch.rand(()), random.random(), np.random.rand(), np.random.standard_normal()])


class FetchedAtOnce(Noisy):
    """Fetches the items of a batch in one call."""

    def __getitems__(self, indices):
        shift = random.random()
        return [self[index] + shift for index in reversed(indices)]


class OwnGenerators(Noisy):
    """Draws from its attributes, generators of every kind."""

    def __init__(self, rows: int = 11):
        super().__init__(rows)
        self.numpy = np.random.default_rng(1)
        self.legacy = np.random.RandomState(2)
        self.python = random.Random(3)
        self.torch = torch.Generator().manual_seed(4)

    def __getitem__(self, index):
        draws = [self.numpy.random(), self.legacy.rand(), self.python.random(), torch.rand((), generator=self.torch)]
        return torch.tensor([index, *draws])


class LazyPermutation(Sampler):
    """Draws every index from the global generators, when it is asked for it."""

    def __init__(self, rows: int = 11):
        self.rows = rows

    def __iter__(self):
        for _ in range(self.rows):
            yield random.randrange(self.rows)

    def __len__(self):
        return self.rows


class OwnGenerator(LazyPermutation):
    """Draws every index from the sampler's generator."""

    def __init__(self):
        super().__init__()
        self.generator = np.random.default_rng(0)

    def __iter__(self):
        for _ in range(self.rows):
            yield int(self.generator.integers(self.rows))


class OwnBatches(Sampler):
    """Makes batches of uneven sizes, drawn as they are asked for."""

    def __iter__(self):
        for _ in range(6):
            yield torch.randint(11, (1 + random.randrange(3),)).tolist()

    def __len__(self):
        return 6


class Told(SequentialSampler):
    """Has an order for every epoch."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter(np.roll(range(11), self.epoch).tolist())


class NoisyBatches(BatchSampler):
    """A subclass of torch's batch sampler that draws."""

    def __iter__(self):
        return (batch for batch in super().__iter__() if torch.rand(()) < 2)


def noisy_collate(items):
    return torch.stack(items) + torch.rand(())


def only_row(item):
    return item.unsqueeze(0)


SUBSET = [0, 3, 4, 8, 9, 10]
MADE = {
    "in order": lambda **how: DataLoader(Noisy(), batch_size=4, **how),
    "shuffled": lambda **how: DataLoader(Noisy(), batch_size=4, shuffle=True, **how),
    "last dropped": lambda **how: DataLoader(Noisy(), batch_size=4, shuffle=True, drop_last=True, **how),
    "a subset": lambda **how: DataLoader(Noisy(), batch_size=2, sampler=SubsetRandomSampler(SUBSET), **how),
    "weighted": lambda **how: DataLoader(
        Noisy(), batch_size=3, sampler=WeightedRandomSampler(torch.arange(1, 12), 14), **how
    ),
    "drawn with replacement": lambda **how: DataLoader(
        Noisy(), batch_size=3, sampler=RandomSampler(range(11), replacement=True, num_samples=20), **how
    ),
    "several permutations": lambda **how: DataLoader(
        Noisy(), batch_size=3, sampler=RandomSampler(range(11), num_samples=30), **how
    ),
    "lazily drawn": lambda **how: DataLoader(Noisy(), batch_size=3, sampler=LazyPermutation(), **how),
    "drawn from its own generator": lambda **how: DataLoader(Noisy(), batch_size=3, sampler=OwnGenerator(), **how),
    "distributed": lambda **how: DataLoader(
        Noisy(), batch_size=2, sampler=DistributedSampler(Noisy(), num_replicas=2, rank=1), **how
    ),
    "told the epoch": lambda **how: DataLoader(Noisy(), batch_size=2, sampler=Told(Noisy()), **how),
    "own batches": lambda **how: DataLoader(Noisy(), batch_sampler=OwnBatches(), **how),
    "a subclass of batches": lambda **how: DataLoader(
        Noisy(), batch_sampler=NoisyBatches(RandomSampler(range(11)), 3, False), **how
    ),
    "without batches": lambda **how: DataLoader(Noisy(), batch_size=None, shuffle=True, collate_fn=only_row, **how),
    "noisy collation": lambda **how: DataLoader(Noisy(), batch_size=4, collate_fn=noisy_collate, **how),
    "fetched at once": lambda **how: DataLoader(FetchedAtOnce(), batch_size=4, shuffle=True, **how),
    "own generators": lambda **how: DataLoader(OwnGenerators(), batch_size=4, shuffle=True, **how),
    "wrapped": lambda **how: DataLoader(
        ConcatDataset([Noisy(5), Subset(OwnGenerators(), SUBSET)]), batch_size=4, shuffle=True, **how
    ),
}


def drawn(loader: Loader, epoch: int, start: int = 0) -> list[list]:
    return [batch.tolist() for batch in loader.batches(epoch, start)]


@pytest.mark.guarantee("resumed-runs-are-identical")
@pytest.mark.parametrize("make", MADE.values(), ids=MADE)
def test_epoch_resumes_at_any_batch(make):
    """The remaining batches are the same, also for a new loader and after random draws."""
    loader = TorchLoader(make(), 3)
    for epoch in (0, 2):
        full_epoch = drawn(loader, epoch)
        assert len(full_epoch) == len(loader)
        for start in (0, 1, len(full_epoch) - 1, len(full_epoch), len(full_epoch) + 3):
            torch.rand(random.randrange(4))
            assert drawn(TorchLoader(make(), 3), epoch, start) == full_epoch[start:]
            assert drawn(loader, epoch, start) == full_epoch[start:]


@pytest.mark.some_rows(3)
@pytest.mark.process
@pytest.mark.parametrize("make", MADE.values(), ids=MADE)
def test_workers_yield_the_batches_of_the_main_process(make):
    alone, shared = TorchLoader(make(), 3), TorchLoader(make(num_workers=2, prefetch_factor=3), 3)
    assert drawn(shared, 1, start=1) == drawn(alone, 1, start=1)


@pytest.mark.parametrize("make", MADE.values(), ids=MADE)
def test_interleaved_epochs_do_not_affect_each_other(make):
    """Two iterators of one loader read different epochs in turn."""
    loader = TorchLoader(make(), 3)
    pairs = list(zip(loader.batches(0), loader.batches(1, start=1), strict=False))
    assert [first.tolist() for first, _ in pairs] == drawn(loader, 0)[: len(pairs)]
    assert [second.tolist() for _, second in pairs] == drawn(loader, 1)[1:]


@pytest.mark.process
@given(
    rows=st.integers(1, 40), batch_size=st.integers(1, 9), epoch=st.integers(0, 3), start=st.integers(0, 41),
    workers=st.sampled_from([0, 0, 0, 0, 2]), seed=st.integers(0, 5), drop=st.booleans(),
)  # fmt: skip
@settings(max_examples=40, deadline=None)
def test_batch_depends_only_on_seed_epoch_and_index(rows, batch_size, epoch, start, workers, seed, drop):
    """Workers, the start and earlier draws have no effect, and no row occurs twice in an epoch."""

    def make(workers: int) -> TorchLoader:
        options = {"batch_size": batch_size, "shuffle": True, "drop_last": drop, "num_workers": workers}
        return TorchLoader(DataLoader(Noisy(rows), **options), seed)

    full_epoch = drawn(make(0), epoch)
    torch.rand(3)
    assert drawn(make(workers), epoch, start) == full_epoch[start:]
    seen = [row[0] for batch in full_epoch for row in batch]
    assert len(set(seen)) == len(seen) == (rows // batch_size * batch_size if drop else rows)


def test_skipped_and_future_batches_are_not_loaded():
    """Only the rows of the requested batch are read from the dataset."""
    dataset = Noisy(1000)
    batches = TorchLoader(DataLoader(dataset, batch_size=10, shuffle=True), 3).batches(0, start=90)
    assert dataset.fetched == []
    next(batches)
    assert len(dataset.fetched) == 10
    assert dataset.fetched == [int(row[0]) for row in drawn(TorchLoader(DataLoader(Noisy(1000), 10, True), 3), 0)[90]]


class Rows:
    """A sequence of many rows that stores only its length."""

    def __init__(self, rows: int):
        self.rows = rows

    def __len__(self):
        return self.rows

    def __getitem__(self, index):
        return torch.tensor(index)


class Counting(Sampler):
    """A custom sampler."""

    def __iter__(self):
        return iter(range(1_000_000))

    def __len__(self):
        return 1_000_000


@pytest.mark.parametrize(
    "sampler",
    [SequentialSampler(Rows(10**9)), RandomSampler(Rows(10**9), replacement=True), Counting()],
    ids=["sequence", "with replacement", "unknown"],
)
def test_skipping_many_batches_is_fast(sampler):
    """Skipping 100,000 batches takes less than a second of processor time."""
    loader = TorchLoader(DataLoader(Rows(10**9), batch_size=8, sampler=sampler), 3)
    begin = time.process_time()
    assert len(next(loader.batches(0, start=100_000))) == 8
    assert time.process_time() - begin < 1


def test_tensor_loader_starts_late_without_listing_earlier_batches():
    loader = TensorLoader((torch.arange(1_000_001),), 4, random_order(1_000_001, 3))
    assert [len(batch) for (batch,) in loader.batches(0, start=249_999)] == [4, 1]
    assert list(loader.batches(0, start=250_001)) == []


def test_generators_of_the_dataset_are_preserved():
    """Reading an epoch leaves them in the state they had."""
    dataset, untouched = OwnGenerators(), OwnGenerators()
    for _ in TorchLoader(DataLoader(dataset, batch_size=4), 3).batches(0):
        pass
    assert dataset[5].tolist() == untouched[5].tolist()


class Stream(IterableDataset):
    """Rows with noise from the dataset's generator."""

    def __init__(self):
        self.generator = np.random.default_rng(0)

    def __iter__(self):
        return (torch.tensor([row, self.generator.random(), torch.rand(())]) for row in range(10))


@pytest.mark.process
@pytest.mark.parametrize("workers", [0, 1])
def test_stream_is_skipped_up_to_the_batch(workers):
    """An iterable dataset yields the same batches in the same epoch."""
    loader = TorchLoader(DataLoader(Stream(), batch_size=3, num_workers=workers), 3)
    first, second = drawn(loader, 0), drawn(loader, 1)
    assert drawn(loader, 0) == first != second
    assert drawn(loader, 1, start=2) == second[2:]


class Doubled(DataLoader):
    """A DataLoader with a custom iteration."""

    def __iter__(self):
        return (2 * batch for batch in super().__iter__())


def test_custom_dataloader_iteration_is_preserved():
    """A subclass of DataLoader that overrides __iter__ is iterated unchanged."""
    full_epoch = drawn(TorchLoader(Doubled(Rows(8), batch_size=2, shuffle=True), 3), 0)
    assert sorted(chain(*full_epoch)) == [2 * row for row in range(8)]
    assert drawn(TorchLoader(Doubled(Rows(8), batch_size=2, shuffle=True), 3), 0, start=3) == full_epoch[3:]


class Opened(Dataset):
    """Is opened by the worker that reads it."""

    offset = 0

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return torch.tensor([index + self.offset, get_worker_info().dataset is self])


def open_dataset(worker: int) -> None:
    get_worker_info().dataset.offset = 100


@pytest.mark.process
def test_worker_init_fn_receives_the_original_dataset():
    loader = TorchLoader(DataLoader(Opened(), batch_size=2, num_workers=1, worker_init_fn=open_dataset), 3)
    assert drawn(loader, 0) == [[[100, 1], [101, 1]], [[102, 1], [103, 1]]]


@pytest.mark.process
def test_dataset_error_is_raised_to_the_caller():
    for workers in (0, 1):
        loader = TorchLoader(DataLoader(Noisy(3), batch_size=2, sampler=[0, 1, 7], num_workers=workers), 3)
        with pytest.raises(IndexError, match="7"):
            list(islice(loader.batches(0), 5))


def test_out_of_order_workers_are_refused():
    with pytest.raises(UsageError, match="yields batches in the order in which workers finish; set it to True"):
        TorchLoader(DataLoader(Rows(4), num_workers=1, in_order=False), 3)


@pytest.mark.slow
def test_spawned_workers_yield_the_same_batches():
    spawned = DataLoader(Noisy(), batch_size=4, num_workers=2, multiprocessing_context="spawn", shuffle=True)
    assert drawn(TorchLoader(spawned, 3), 1, 1) == drawn(TorchLoader(MADE["shuffled"](), 3), 1, 1)
