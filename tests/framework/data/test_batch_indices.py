"""Orders of rows can be read from any row on, and equal those of torch's samplers."""

import tracemalloc
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loopscope.data.batch_indices import BLOCK, batch_indices, random_blocks, rows_from
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, SubsetRandomSampler


def draw(block: int) -> torch.Generator:
    return torch.Generator().manual_seed(1000 + block)


def random_rows(rows: int, total: int, start: int, *, replacement: bool) -> list[int]:
    return [row for block in random_blocks(rows, total, start, draw, replacement=replacement) for row in block.tolist()]


@given(rows=st.integers(1, 30), total=st.integers(0, 100), start=st.integers(0, 110), replacement=st.booleans())
@settings(deadline=None)
def test_random_order_is_same_from_any_row(rows, total, start, replacement):
    """Reading from a later row gives the rest of the whole order, with and without replacement."""
    full_order = random_rows(rows, total, 0, replacement=replacement)
    assert random_rows(rows, total, start, replacement=replacement) == full_order[start:]
    assert len(full_order) == total
    assert set(full_order) <= set(range(rows))


@given(rows=st.integers(1, 30), total=st.integers(0, 100))
def test_rows_without_replacement_occur_equally_often(rows, total):
    """The counts of two rows differ by at most one."""
    counts = Counter(random_rows(rows, total, 0, replacement=False))
    assert all(total // rows <= counts[row] <= -(-total // rows) for row in range(rows))


def test_blocks_of_long_order_join_seamlessly():
    """Reading may start just before, at or after a block boundary."""
    for replacement in (False, True):
        rows, total = 2 * BLOCK + 5, 2 * BLOCK + 3
        full_order = random_rows(rows, total, 0, replacement=replacement)
        for start in (BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK):
            assert random_rows(rows, total, start, replacement=replacement) == full_order[start:]
        assert len(set(full_order)) == total or replacement


def test_draws_with_replacement_differ_from_block_to_block():
    full_order = random_rows(1000, 2 * BLOCK, 0, replacement=True)
    assert full_order[:BLOCK] != full_order[BLOCK:]
    assert sum(full_order) / len(full_order) == pytest.approx(499.5, abs=4)  # five standard errors


@given(rows=st.integers(0, 30), batch_size=st.integers(1, 8), drop_last=st.booleans(), start=st.integers(0, 31))
def test_batches_equal_those_of_torch(rows, batch_size, drop_last, start):
    sampler = BatchSampler(SequentialSampler(range(rows)), batch_size, drop_last)
    dataloader = DataLoader(range(rows), batch_sampler=sampler)
    assert list(batch_indices(dataloader, start, draw)) == list(sampler)[start:]


def test_known_samplers_yield_their_length():
    """The samplers are sequential, random with and without replacement, and over a subset."""
    subset = [3, 5, 9]
    for sampler in (
        SequentialSampler(range(7)),
        RandomSampler(range(7)),
        RandomSampler(range(7), num_samples=17),
        RandomSampler(range(7), replacement=True, num_samples=3),
        SubsetRandomSampler(subset),
    ):
        assert len(list(rows_from(sampler, 0, draw))) == len(sampler)
    assert sorted(rows_from(SubsetRandomSampler(subset), 0, draw)) == subset


def test_long_order_is_not_stored_as_list():
    """Reading from an order of two million rows takes less than 10 MB."""
    tracemalloc.start()
    try:
        rows = rows_from(RandomSampler(range(2_000_000)), 500_000, draw)
        assert 0 <= next(rows) < 2_000_000
        assert tracemalloc.get_traced_memory()[1] < 10e6  # a list of all rows takes 80 MB
    finally:
        tracemalloc.stop()


def test_sequence_starts_at_any_row():
    rows = rows_from(SequentialSampler(range(10**12)), 10**11, draw)
    assert [next(rows), next(rows)] == [10**11, 10**11 + 1]
