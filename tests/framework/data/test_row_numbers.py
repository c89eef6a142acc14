"""Row numbers identify the rows of the data set in each batch, starting at any batch."""

from collections.abc import Iterator
from itertools import zip_longest
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loopscope.data import (
    Loader,
    RowNumbers,
    RowsOfRank,
    TensorLoader,
    TorchLoader,
    fixed_order,
    part_of,
    with_copied_batches,
)
from loopscope.data import random_order as drawn
from loopscope.experiments.tied_lm.tokens import TokenLoader
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from tests.framework.data.test_resumed_loaders import LazyPermutation, Noisy
from tests.support import Case, SpyHook, build, train


class Counting(Sampler[int]):
    """Continues each iteration at the position of the last one."""

    def __init__(self, rows: int) -> None:
        self.rows, self.begun = rows, 0

    def __iter__(self) -> Iterator[int]:
        self.begun += 1
        yield from ((row + self.begun) % self.rows for row in range(self.rows))

    def __len__(self) -> int:
        return self.rows


class Uneven(Sampler[list[int]]):
    """Batches of 1, 2, 3, ... rows."""

    def __init__(self, rows: int) -> None:
        self.batches = [[*range(first, min(rows, first + 1 + first % 3))] for first in range(0, rows, 3)]

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


SAMPLERS = {
    "in order": SequentialSampler,
    "random": RandomSampler,
    "replacement": lambda data: RandomSampler(data, replacement=True, num_samples=2 * len(data)),
    "subset": lambda data: SubsetRandomSampler([*range(0, len(data), 2)]),
    "weighted": lambda data: WeightedRandomSampler(range(1, len(data) + 1), len(data)),
    "drawn late": lambda data: LazyPermutation(len(data)),
}


def loader(kind: str, rows: int, size: int, *, drop_last: bool = False) -> tuple[Loader, torch.Tensor]:
    """Return a loader of rows that differ, and these."""
    data = torch.arange(rows) * 7
    if kind in ("fixed", "reshuffled"):
        order = drawn(rows, 3) if kind == "reshuffled" else fixed_order(torch.arange(rows).flip(0))
        return TensorLoader([data], size, order), data
    if kind == "uneven":
        return TorchLoader(DataLoader(TensorDataset(data), batch_sampler=Uneven(rows)), 3), data
    dataset = TensorDataset(data)
    return TorchLoader(DataLoader(dataset, size, sampler=SAMPLERS[kind](dataset), drop_last=drop_last), 3), data


@pytest.mark.longer
@pytest.mark.guarantee("runs-can-be-verified")
@given(
    kind=st.sampled_from(["fixed", "reshuffled", "uneven", *SAMPLERS]),
    rows=st.integers(1, 40),
    size=st.integers(1, 9),
    epoch=st.integers(0, 3),
    start=st.integers(0, 6),
    drop_last=st.booleans(),
)
@settings(deadline=None, max_examples=150)
def test_row_indices_match_the_batches(kind, rows, size, epoch, start, drop_last):
    """They select the rows of each batch for every sampler, epoch and start, without random draws."""
    made, data = loader(kind, rows, size, drop_last=drop_last)
    original = torch.get_rng_state()
    for source in (made, with_copied_batches(made)):
        indices = source.row_indices(epoch, start)
        for (batch,), index in zip_longest(source.batches(epoch, start), indices):
            assert index.dtype is torch.int64
            assert torch.equal(data[index], batch)
    assert torch.equal(torch.get_rng_state(), original)


@given(rows=st.integers(6, 40), count=st.integers(1, 3))
@settings(deadline=None, max_examples=20)
def test_rows_of_all_ranks_form_the_full_batch(rows, count):
    """The indices of each rank select the rows of that rank's batches."""
    made, data = loader("reshuffled", rows, 6)
    if rows % 6 in range(1, count):
        return
    shares = [RowsOfRank(made, rank, count) for rank in range(count)]
    parts = [[*share.row_indices(1)] for share in shares]
    assert [torch.cat(batch).tolist() for batch in zip(*parts, strict=True)] == [
        batch.tolist() for batch in made.row_indices(1)
    ]
    for share, indices in zip(shares, parts, strict=True):
        assert all(torch.equal(data[index], batch) for (batch,), index in zip(share.batches(1), indices, strict=True))


def test_token_windows_are_numbered_by_their_offset():
    tokens = torch.arange(200).numpy()
    made = TokenLoader(tokens, context=5, batch_size=4, vocabulary=200, seed=1, device=torch.device("cpu"))
    for (inputs, _), places in zip(made.batches(2, 3), made.row_indices(2, 3), strict=True):
        assert torch.equal(inputs[:, 0], places)


@pytest.mark.guarantee("runs-can-be-verified")
def test_custom_sampler_is_not_advanced():
    """Its row numbers are nevertheless those of the batches."""
    sampler = Counting(10)
    made = TorchLoader(DataLoader(TensorDataset(torch.arange(10)), 4, sampler=sampler), 1)
    named = [index.tolist() for index in made.row_indices(0)]
    assert sampler.begun == 0
    assert named == [batch.tolist() for (batch,) in made.batches(0)]


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


class Keyed(dict):
    """Rows by keys that are no numbers."""


class OwnBatches(TensorLoader):
    def batches(self, epoch: int, start: int = 0) -> Iterator[Any]:
        return iter([(torch.zeros(2),)])


class OwnIteration(DataLoader):
    def __iter__(self) -> Iterator[Any]:
        return iter([torch.zeros(2)])


@pytest.mark.parametrize(
    "made",
    [
        TorchLoader(DataLoader(Stream(), 2), 1),
        TorchLoader(DataLoader(Keyed(a=1, b=2), 2, sampler=["a", "b"]), 1),
        TorchLoader(DataLoader(Noisy(), batch_size=None), 1),
        TorchLoader(OwnIteration(Noisy(), 2), 1),
        OwnBatches([torch.zeros(4)], 2, drawn(4, 1)),
    ],
    ids=["a stream", "keys", "no batching", "an own iteration", "own batches"],
)
def test_rows_without_numbers_are_unknown(made):
    assert made.row_indices(0) is None
    assert RowNumbers(made).of(0, 0) is None


def test_sampler_inside_batch_sampler_is_read():
    made = TorchLoader(DataLoader(range(7), batch_sampler=BatchSampler(SequentialSampler(range(7)), 3, False)), 1)
    assert [batch.tolist() for batch in made.row_indices(0, 1)] == [[3, 4, 5], [6]]


@pytest.mark.longer
@given(asked=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 4)), max_size=12))
@settings(deadline=None, max_examples=40)
def test_row_numbers_can_be_requested_in_any_order(asked):
    """The returned tensor can be modified by the caller."""
    made, _ = loader("reshuffled", 19, 4)
    numbers = RowNumbers(made)
    for epoch, batch in asked:
        rows = numbers.of(epoch, batch)
        assert torch.equal(rows, next(made.row_indices(epoch, batch)))
        rows.zero_()  # the result belongs to the caller


def test_writes_to_row_indices_leave_the_order():
    permutation = torch.arange(6)
    made = TensorLoader([permutation * 7], 3, fixed_order(permutation))
    for index in made.row_indices(0):
        index.zero_()
    assert permutation.tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.some_rows(2)
@pytest.mark.parametrize("loop", ["epoch", "step"])
@pytest.mark.parametrize("pieces", [1, 2])
def test_hooks_see_row_indices_only_during_steps(loop, pieces):
    """ctx.row_indices is None at all other hook points."""
    seen: dict[str, int] = {}
    data = build(Case(loop=loop))[0].loader._tensors

    def look(ctx: Any) -> None:
        index = ctx.row_indices
        seen[ctx.hook_point.name] = seen.get(ctx.hook_point.name, 0) + (index is not None)
        if index is not None:
            assert torch.equal(ctx.batch_data[0], data[0][index])

    train(Case(loop=loop), [SpyHook(look)], accumulation_steps=pieces)
    assert {name: bool(count) for name, count in seen.items()} == {
        name: name in ("PRE_STEP", "POST_BACKWARD", "PRE_UPDATE", "POST_STEP") for name in seen
    }


def test_batch_rows_are_selected_by_position():
    """Nested tensors and arrays are indexed; other values are kept."""
    batch = {"x": torch.arange(4), "y": [torch.arange(8).reshape(4, 2).numpy()], "z": 3}
    for places in ([3, 1], torch.tensor([3, 1])):
        part = part_of(batch, places)
        assert part["x"].tolist() == [3, 1]
        assert part["y"][0].tolist() == [[6, 7], [2, 3]]
        assert part["z"] == 3
