"""Loaders are functions of (epoch, first batch); batches of any structure can be counted and split."""

import random
from collections import OrderedDict
from itertools import chain
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from loopscope.data import (
    TensorLoader,
    TorchLoader,
    derived_seed,
    fixed_order,
    micro_batches,
    random_order,
    rows,
    with_copied_batches,
)
from loopscope.errors import LoopscopeError, UsageError
from loopscope.state import RandomStreams
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

NUMBERS = torch.arange(10)


def tensor_loader(batch_size: int = 4, order=None) -> TensorLoader:
    return TensorLoader((NUMBERS, NUMBERS * 10.0), batch_size, order or random_order(10, 3))


def column(batches) -> list[list[int]]:
    """List the first tensor of every batch."""
    return [batch[0].tolist() for batch in batches]


def test_batches_follow_order_with_smaller_last_batch():
    """With a fixed order, every epoch has the same batches."""
    loader = tensor_loader(4, fixed_order(NUMBERS.flip(0)))
    assert column(loader.batches(0)) == [[9, 8, 7, 6], [5, 4, 3, 2], [1, 0]]
    assert len(loader) == 3
    assert column(loader.batches(0)) == column(loader.batches(1)) == column(loader)


def test_the_rows_of_all_tensors_stay_together():
    for numbers, tens in tensor_loader().batches(5):
        assert torch.equal(numbers * 10.0, tens)


@given(st.integers(1, 11), st.integers(0, 3), st.integers(0, 12))
def test_later_start_yields_rest_of_epoch(batch_size, epoch, start):
    """The property holds for any batch size, epoch and first batch."""
    loader = tensor_loader(batch_size)
    full_epoch = column(loader.batches(epoch))
    assert column(loader.batches(epoch, start)) == full_epoch[start:]
    assert sorted(chain(*full_epoch)) == list(range(10))
    assert len(full_epoch) == len(loader)


def test_random_order_depends_only_on_seed_and_epoch():
    first = random_order(10, 3)(2)
    torch.rand(7)
    assert torch.equal(random_order(10, 3)(2), first)
    assert not torch.equal(random_order(10, 3)(1), first)
    assert not torch.equal(random_order(10, 4)(2), first)


def test_loader_does_not_use_global_streams():
    original = torch.get_rng_state()
    list(tensor_loader().batches(0))
    list(tensor_loader().shuffled(5).batches(0))
    assert torch.equal(torch.get_rng_state(), original)


class Copies(TorchDispatchMode):
    """Counts the copies between devices, and lists the device of every index with that of the indexed tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.indexed: list[tuple[str, str]] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function.overloadpacket is torch.ops.aten._to_copy
        if function.overloadpacket is torch.ops.aten.index:
            self.indexed.append((args[0].device.type, args[1][0].device.type))
        return function(*args, **(kwargs or {}))


def test_order_is_copied_to_each_device_once():
    """Not the indices of each batch, since the host waits for every copy to a device."""
    there = [torch.zeros(10, *shape, device="meta") for shape in ([], [2])]
    with Copies() as copies:
        batches = list(TensorLoader((there[0], NUMBERS, there[1]), 3, random_order(10, 3)).batches(0))
    assert [[*map(len, batch)] for batch in batches] == [[3] * 3] * 3 + [[1] * 3]
    assert copies.indexed == [("meta", "meta"), ("cpu", "cpu"), ("meta", "meta")] * 4
    assert copies.count == 1


@pytest.mark.guarantee("observers-change-nothing")
def test_two_iterators_do_not_interfere():
    """Iterating over a loader does not advance another iteration over it."""
    loader = tensor_loader()
    pairs = list(zip(loader.batches(0), loader.batches(0), strict=True))
    assert all(torch.equal(a[0], b[0]) for a, b in pairs)


def test_shuffled_loader_reorders_the_same_rows():
    """The new order changes with the epoch and ignores the original order."""
    shuffled = tensor_loader(4, fixed_order(NUMBERS)).shuffled(5)
    assert sorted(chain(*column(shuffled.batches(0)))) == list(range(10))
    assert column(shuffled.batches(0)) != column(shuffled.batches(1))
    assert column(shuffled.batches(0)) == column(tensor_loader(4).shuffled(5).batches(0))


def test_derived_seeds_are_portable_and_distinct():
    """A seed is equal on every machine and changes with each part of its key."""
    assert derived_seed(199, "order", 0) == 7313308332965189692
    assert len({derived_seed(1, "order", 0), derived_seed(1, "order", 1), derived_seed(1, "x", 0)}) == 3


@pytest.mark.parametrize(
    ("tensors", "batch_size", "sentence"),
    [
        ((NUMBERS, NUMBERS[:3]), 2, r"have \[10, 3\] rows; give all the same number"),
        ((NUMBERS[:0],), 2, "at least one"),
        ((), 2, "at least one"),
        ((NUMBERS,), 0, "batch_size is 0"),
    ],
)
def test_invalid_tensors_are_refused(tensors, batch_size, sentence):
    with pytest.raises(UsageError, match=sentence):
        TensorLoader(tensors, batch_size, fixed_order(NUMBERS))


def test_incomplete_order_is_refused():
    """The error names the number of rows in the order and in the data."""
    with pytest.raises(UsageError, match="The order of epoch 0 has 3 rows, the data 10"):
        list(tensor_loader(4, fixed_order(NUMBERS[:3])).batches(0))


class Noisy(Dataset):
    """Draws from every global generator, as augmentation does."""

    def __len__(self):
        return 6

    def __getitem__(self, index):
        return torch.tensor([index, torch.rand(()), random.random(), np.random.rand(), np.random.standard_normal()])


class ViaPermutation:
    """A custom sampler that draws from the global generator."""

    def __iter__(self):
        return iter(torch.randperm(6).tolist())

    def __len__(self):
        return 6


def weighted() -> WeightedRandomSampler:
    return WeightedRandomSampler(torch.ones(6), 6, generator=torch.Generator().manual_seed(1))


LOADERS = {
    "shuffle": lambda: DataLoader(Noisy(), batch_size=4, shuffle=True),
    "own generator": lambda: DataLoader(Noisy(), batch_size=4, shuffle=True, generator=torch.Generator()),
    "subset": lambda: DataLoader(Noisy(), batch_size=2, sampler=SubsetRandomSampler([0, 3, 4])),
    "weighted": lambda: DataLoader(Noisy(), batch_size=4, sampler=weighted()),
    "unknown sampler": lambda: DataLoader(Noisy(), batch_size=4, sampler=ViaPermutation()),
    "unbatched": lambda: DataLoader(Noisy(), batch_size=None, shuffle=True),
    "distributed": lambda: DataLoader(Noisy(), batch_size=2, sampler=DistributedSampler(Noisy(), 2, 1)),
}


def drawn(loader: TorchLoader, epoch: int, start: int = 0) -> list[list]:
    return [batch.tolist() for batch in loader.batches(epoch, start)]


@pytest.mark.parametrize("make", LOADERS.values(), ids=LOADERS)
def test_dataloader_depends_only_on_seed_and_epoch(make):
    """The wrapped DataLoader ignores global random state and can start at a later batch."""
    loader = TorchLoader(make(), 3)
    first, second = drawn(loader, 0), drawn(loader, 1)
    torch.manual_seed(99)
    random.seed(99)
    np.random.seed(99)
    assert drawn(loader, 0) == first == drawn(TorchLoader(make(), 3), 0)
    assert drawn(loader, 1) == second != first
    assert drawn(TorchLoader(make(), 4), 0) != first
    assert drawn(loader, 1, start=1) == second[1:]


def parts_of(loader: DataLoader) -> list:
    return [loader.sampler, loader.batch_sampler, loader.generator, getattr(loader.sampler, "generator", None)]


@pytest.mark.parametrize("make", LOADERS.values(), ids=LOADERS)
def test_wrapping_does_not_change_the_dataloader(make):
    untouched, taken = make(), make()
    parts, loader = parts_of(taken), TorchLoader(taken, 3)
    loader.drawn(4), drawn(loader, 1, start=1), drawn(loader, 2)
    assert all(one is other for one, other in zip(parts, parts_of(taken), strict=True))
    for owned in (untouched, taken):
        torch.manual_seed(0), random.seed(0), np.random.seed(0)
        owned.seen = [batch.tolist() for epoch in range(2) for batch in owned]
    assert taken.seen == untouched.seen


@pytest.mark.guarantee("observers-change-nothing")
@pytest.mark.parametrize("make", LOADERS.values(), ids=LOADERS)
def test_dataloader_leaves_global_random_streams_unchanged(make):
    """The test compares all streams after every batch, including NumPy's cached Gaussian."""
    np.random.standard_normal()  # leaves a cached Gaussian behind, which is part of the state
    streams = RandomStreams(0)
    original = streams.save()
    for _ in TorchLoader(make(), 3).batches(0):
        now = streams.save()
        assert now.global_states == original.global_states


@pytest.mark.parametrize("make", LOADERS.values(), ids=LOADERS)
def test_simultaneous_dataloader_readers_get_equal_batches(make):
    loader = TorchLoader(make(), 3)
    pairs = list(zip(loader.batches(0), loader.batches(0), strict=True))
    assert all(torch.equal(a, b) for a, b in pairs)
    assert [a.tolist() for a, _ in pairs] == drawn(loader, 0)


def test_drawing_between_batches_changes_no_batch():
    loader = TorchLoader(LOADERS["shuffle"](), 3)
    expected, batch_lists = drawn(loader, 0), []
    for batch in loader.batches(0):
        batch_lists.append(batch.tolist())
        torch.rand(5)
        random.random()
    assert batch_lists == expected


@pytest.mark.slow
def test_worker_processes_depend_on_seed_and_epoch():
    """With a worker process, global random state is neither read nor changed."""

    def make() -> TorchLoader:
        workers = DataLoader(Noisy(), batch_size=4, shuffle=True, num_workers=1, multiprocessing_context="spawn")
        return TorchLoader(workers, 3)

    original = torch.get_rng_state()
    first = drawn(make(), 1)
    assert torch.equal(torch.get_rng_state(), original)
    torch.manual_seed(5)
    assert drawn(make(), 1) == first


def numbers_loader(**options) -> DataLoader:
    return DataLoader(TensorDataset(NUMBERS), **{"batch_size": 4, **options})


@pytest.mark.parametrize(("drop_last", "sizes"), [(False, [4, 4, 2]), (True, [4, 4])])
def test_reshuffled_dataloader_keeps_its_batching(drop_last, sizes):
    """Batch sizes and drop_last stay the same, and the order changes with the epoch."""
    shuffled = TorchLoader(numbers_loader(drop_last=drop_last), 3).shuffled(7)
    epochs = [column(shuffled.batches(epoch)) for epoch in (0, 1)]
    assert [len(batch) for batch in epochs[0]] == sizes
    assert len(shuffled) == len(sizes)
    assert epochs[0] != epochs[1]
    if not drop_last:
        assert sorted(chain(*epochs[0])) == list(range(10))


@pytest.mark.guarantee("hooks-are-independent")
@pytest.mark.parametrize("drop_last", [False, True])
def test_drawn_batches_depend_on_rows_not_order(drop_last):
    """Loaders that visit the same rows in different orders draw the same batches."""
    options = {"batch_size": 4, "drop_last": drop_last}
    order = NUMBERS.flip(0).tolist()
    batches = [order[:4], order[4:8], *([] if drop_last else [order[8:]])]
    loaders = [
        DataLoader(TensorDataset(NUMBERS), **options),
        DataLoader(TensorDataset(NUMBERS), shuffle=True, **options),
        DataLoader(TensorDataset(NUMBERS), sampler=order, **options),
        DataLoader(TensorDataset(NUMBERS), sampler=SubsetRandomSampler(order), **options),
    ]
    if not drop_last:
        loaders.append(DataLoader(TensorDataset(NUMBERS), batch_sampler=batches))
    batch_lists = [column(TorchLoader(loader, seed).drawn(5).batches(0)) for seed, loader in enumerate(loaders)]
    assert all(batches == batch_lists[0] for batches in batch_lists)
    assert sorted(chain(*batch_lists[0])) != list(chain(*batch_lists[0]))
    assert column(tensor_loader().drawn(5)) == column(tensor_loader(order=fixed_order(NUMBERS)).drawn(5))
    assert column(with_copied_batches(TorchLoader(loaders[2], 1)).drawn(5)) == batch_lists[0]


def test_only_rows_that_the_sampler_visits_are_drawn():
    loader = DataLoader(TensorDataset(NUMBERS), batch_size=2, sampler=SubsetRandomSampler([1, 4, 7]))
    assert sorted(chain(*column(TorchLoader(loader, 3).drawn(5).batches(0)))) == [1, 4, 7]


def test_rows_without_batches_are_drawn_singly():
    """A DataLoader with batch_size=None yields each row by itself."""
    every = list(TorchLoader(DataLoader(NUMBERS, batch_size=None, sampler=[3, 1, 2]), 3).drawn(5).batches(0))
    assert sorted(map(int, every)) == [1, 2, 3]


def test_a_stream_cannot_be_drawn_from():
    with pytest.raises(UsageError, match="A DataLoader of Endless streams rows, so they cannot be drawn"):
        TorchLoader(DataLoader(Endless(), batch_size=2), 3).drawn(1)


class Endless(IterableDataset):
    """A stream without an order to change."""

    def __iter__(self):
        return iter(torch.arange(4))


class Alternating:
    """A custom batch sampler."""

    def __iter__(self):
        return iter([[0, 2], [1, 3]])

    def __len__(self):
        return 2


@pytest.mark.parametrize(
    "make",
    [
        LOADERS["subset"],
        LOADERS["weighted"],
        LOADERS["distributed"],
        lambda: DataLoader(Endless(), batch_size=2),
        lambda: DataLoader(TensorDataset(NUMBERS), batch_sampler=Alternating()),
    ],
)
def test_unshufflable_loader_is_refused(make):
    """A subset, weighted, distributed or batch sampler or an iterable dataset cannot be reshuffled."""
    loader = TorchLoader(make(), 3)
    assert list(loader.batches(0))
    with pytest.raises(UsageError, match="cannot be reshuffled; only an order of the whole dataset can"):
        loader.shuffled(1)


@pytest.mark.process
@pytest.mark.parametrize("is_stream", [False, True])
def test_persistent_workers_do_not_persist_here(is_stream):
    """The batches are those of workers that end with the epoch, also after another pass of the DataLoader."""
    data = Endless() if is_stream else range(6)
    source = DataLoader(data, batch_size=2, num_workers=1, persistent_workers=True)
    next(iter(source))
    expected = TorchLoader(DataLoader(data, batch_size=2, num_workers=1), 3)
    loader = TorchLoader(source, 3)
    for epoch in (0, 1, 0):
        pairs = zip(loader.batches(epoch), expected.batches(epoch), strict=True)
        assert all(torch.equal(batch, other) for batch, other in pairs)


class Pair(NamedTuple):
    """A batch with named parts."""

    inputs: torch.Tensor
    targets: torch.Tensor


STRUCTURES = {
    "tensor": lambda x: x,
    "tuple": lambda x: (x, x * 2),
    "list": lambda x: [x, x * 2],
    "named tuple": lambda x: Pair(x, x * 2),
    "dict": lambda x: {"a": x, "b": x * 2},
    "ordered dict": lambda x: OrderedDict(a=x),
    "nested": lambda x: ({"a": [x, x * 2]}, Pair(x, x)),
    "with constants": lambda x: {"scale": 2.0, "mask": None, "name": "text", "weight": torch.tensor(3.0), "a": x},
}


def flat(batch) -> list[torch.Tensor]:
    if isinstance(batch, torch.Tensor):
        return [batch] if batch.ndim else []
    items = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, (list, tuple)) else ()
    return [leaf for item in items for leaf in flat(item)]


@pytest.mark.parametrize("structure", STRUCTURES.values(), ids=STRUCTURES)
@pytest.mark.parametrize("pieces", [1, 2, 3, 7, 8, 20])
def test_micro_batches_keep_structure_and_join(structure, pieces):
    """Their number and sizes are bounded, and their concatenation equals the batch."""
    batch = structure(torch.arange(14).reshape(7, 2))
    parts = micro_batches(batch, pieces)
    assert len(parts) <= pieces
    assert sum(map(rows, parts)) == rows(batch) == 7
    assert max(map(rows, parts)) == -(-7 // pieces)
    joined = [torch.cat(leaves) for leaves in zip(*map(flat, parts), strict=True)]
    assert all(torch.equal(a, b) for a, b in zip(joined, flat(batch), strict=True))
    expected = dict if isinstance(batch, dict) and pieces > 1 else type(batch)
    assert {type(part) for part in parts} == {expected}


def test_values_without_rows_are_in_every_part():
    for part in micro_batches(STRUCTURES["with constants"](NUMBERS), 3):
        assert (part["scale"], part["mask"], part["name"], part["weight"].item()) == (2.0, None, "text", 3.0)


def test_tensors_of_different_lengths_are_not_split():
    with pytest.raises(LoopscopeError, match=r"tensors have \[3, 10\] rows cannot be split.*accumulation_steps to 1"):
        micro_batches((NUMBERS, NUMBERS[:3]), 2)


def test_a_batch_without_samples_is_refused():
    with pytest.raises(LoopscopeError, match="A batch of type dict has no samples"):
        rows({"scale": 2.0, "weight": torch.tensor(1.0)})
