"""Repeated rows against a set of tuples."""

import pytest
import torch
from loopscope.training_hooks.checks import seen_rows
from loopscope.training_hooks.checks.batch_facts import BatchPart, parts_of
from loopscope.training_hooks.checks.seen_rows import SeenRows, fingerprints

from tests.training_hooks.reloading import through_a_file

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.int32]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fingerprints_differ_exactly_where_rows_differ(dtype: torch.dtype) -> None:
    rows = torch.randint(0, 3, (200, 4), generator=torch.Generator().manual_seed(0)).to(dtype)
    found = fingerprints(BatchPart(rows)).tolist()
    tuples = [tuple(row) for row in rows.tolist()]
    assert len(set(found)) == len(set(tuples)) < 200
    assert all(
        (a == b) == (r == s) for a, r in zip(found, tuples, strict=True) for b, s in zip(found, tuples, strict=True)
    )


def test_targets_belong_to_a_row() -> None:
    rows, targets = torch.zeros(2, 3), torch.tensor([0, 1])
    assert len(set(fingerprints(BatchPart(rows, targets)).tolist())) == 2
    assert len(set(fingerprints(BatchPart(rows)).tolist())) == 1


def test_rows_of_images_are_sampled_and_not_transposed() -> None:
    image = torch.rand(1, 3, 200, 200)
    assert fingerprints(BatchPart(image)) != fingerprints(BatchPart(image.transpose(2, 3)))
    assert fingerprints(BatchPart(image)) == fingerprints(BatchPart(image.clone()))


def test_shares_match_a_set_of_rows() -> None:
    generator, rows, seen = torch.Generator().manual_seed(1), SeenRows(), set[int]()
    for _ in range(5):
        batch = torch.randint(0, 40, (8, 1), generator=generator)
        items = batch.flatten().tolist()
        expected = {
            "repeated_row_fraction": sum(item in seen for item in items) / 8,
            "duplicate_row_fraction": 1 - len(set(items)) / 8,
            "same_batch_count": 0,
        }
        assert rows.add([BatchPart(batch[:3]), BatchPart(batch[3:])], 0) == expected
        seen |= set(items)
    assert rows.add([BatchPart(batch)], 1)["repeated_row_fraction"] == 0
    assert rows.add([], 1) == {}


def test_memory_is_limited_and_continues(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seen_rows, "MOST_ROWS", 5)
    rows, part = SeenRows(), BatchPart(torch.arange(4.0)[:, None])
    rows.add([part], 3)
    rows.add([BatchPart(part.inputs + 10)], 3)
    resumed = SeenRows()
    resumed.load_state_dict(through_a_file(rows.state_dict()))
    for memory in (rows, resumed):
        assert memory.add([part], 3)["repeated_row_fraction"] == 1
        assert memory.add([BatchPart(part.inputs + 10)], 3)["repeated_row_fraction"] == 0


def test_equal_batches_in_a_row_are_counted() -> None:
    """Those with the rows of the one before in another tensor; another order, another epoch and a gap end the count."""
    rows, data = SeenRows(), torch.arange(4.0)[:, None]
    batches = [data, data.clone(), data, data, data.flip(0), data.clone()]
    counts = [rows.add([BatchPart(batch)], 0)["same_batch_count"] for batch in batches]
    assert counts == [0, 1, 2, 0, 0, 0]
    assert rows.add([BatchPart(data)], 0)["same_batch_count"] == 1
    assert rows.add([BatchPart(data.clone())], 1)["same_batch_count"] == 0


def passes(*orders: list[int]) -> list[float | None]:
    """Return the share of repeated rows of each batch in a loop of steps."""
    rows, data = SeenRows(), torch.arange(40.0).reshape(20, 2)
    found = [rows.add([BatchPart(data[order].clone())], None) for order in orders]
    return [metrics.get("repeated_row_fraction") for metrics in found]


def test_later_passes_of_step_loops_do_not_count():
    """Without epochs, rows of the first pass count until nearly all of a batch has been seen."""
    first = [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert passes(*first, [5, 0, 7], [1, 2, 3]) == [0, 0, 0, None, None]
    assert passes([0, 1, 2, 3], [0, 1, 4, 5], [0, 4, 6, 7]) == [0, 0.5, 0.5]


def test_lengths_of_tokens_are_no_rows():
    """The inputs of ``(tokens, lengths, scores)`` are the tokens, and no target is known."""
    tokens = torch.randint(9, (5, 4))
    (part,) = parts_of((tokens, torch.full((5,), 3), torch.rand(5)))
    assert part.inputs is tokens
    assert part.targets is None
