"""Inputs, targets and their statistics in batches of many structures."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from loopscope.data import MicroBatches
from loopscope.training_hooks.checks.batch_facts import (
    BatchPart,
    class_counts,
    input_facts,
    padded_count,
    parts_of,
    target_facts,
)
from torch import Tensor

X, Y = torch.arange(12.0).reshape(4, 3), torch.tensor([0, 1, 1, 1])
TOKENS, LABELS = torch.arange(8).reshape(2, 4), torch.arange(8, 16).reshape(2, 4)
MASK = torch.ones(2, 4, dtype=torch.int64)


@dataclass
class Sample:
    """A batch with attributes."""

    image: Tensor
    label: Tensor


@pytest.mark.parametrize(
    ("batch", "inputs", "targets"),
    [
        ((X, Y), X, Y),
        ([Y, X], X, Y),
        ({"x": X, "y": Y}, X, Y),
        (Sample(X, Y), X, Y),
        (X, X, None),
        ({"features": X, "targets": X[:, :1]}, X, X[:, :1]),
        (TOKENS, TOKENS, None),
        ((TOKENS, LABELS), TOKENS, LABELS),
        ({"attention_mask": MASK, "input_ids": TOKENS, "labels": LABELS}, TOKENS, LABELS),
        ({"input_ids": TOKENS, "token_type_ids": MASK, "attention_mask": MASK}, TOKENS, None),
        ({"inputs": (TOKENS, {"deep": X}), "label": Y}, X, Y),
        ((X.numpy(), Y.numpy()), X, Y),
    ],
    ids=range(12),
)
def test_inputs_and_targets_are_found(batch: Any, inputs: Tensor, targets: Tensor | None) -> None:
    (part,) = parts_of(batch)
    assert torch.equal(part.inputs, inputs)
    assert (part.targets is None) == (targets is None)
    assert targets is None or torch.equal(part.targets, targets)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "batch", [None, {}, ["text"], Y, (torch.empty(0, 3),), np.array(["a"]), X.to("meta")], ids=range(7)
)
def test_batches_without_inputs_have_no_parts(batch: Any) -> None:
    assert parts_of(batch) == []


def test_statistics_of_inputs_match_numpy() -> None:
    parts = parts_of(MicroBatches([(X, Y), (X * 10 - 3, Y)]))
    elements = np.concatenate([X.numpy().ravel(), (X * 10 - 3).numpy().ravel()])
    expected = {"input_mean": elements.mean(), "input_std": elements.std(), "input_max_abs": abs(elements).max()}
    assert input_facts(parts) == pytest.approx(expected, rel=1e-5)
    assert input_facts(parts_of((TOKENS, LABELS))) == {}


def test_large_inputs_are_read_in_part() -> None:
    inputs = torch.zeros(8, 2**16)
    inputs[4:] = 7.0
    assert input_facts([BatchPart(inputs)])["input_max_abs"] == 0.0
    assert input_facts([BatchPart(inputs[4:])])["input_max_abs"] == 7.0


@pytest.mark.parametrize("classes", [[3, 3, -100, 1], [5], [-100, -100], [2**40, 1, 2**40], [-1, 0, -1]])
def test_shares_of_classes_match_a_counter(classes: list[int]) -> None:
    facts = target_facts([BatchPart(X, torch.tensor(classes))])
    counter = Counter(item for item in classes if item != -100)
    assert facts["ignored_target_fraction"] == pytest.approx(classes.count(-100) / len(classes))
    if counter:
        assert facts["target_class_count"] == len(counter)
        assert facts["target_top_fraction"] == max(counter.values()) / counter.total()
        assert facts["target_top"] == min(item for item in counter if counter[item] == max(counter.values()))
        found = class_counts(torch.tensor([*counter.elements()]))
        assert [item.tolist() for item in found] == [sorted(counter), [counter[item] for item in sorted(counter)]]
    else:
        assert "target_class_count" not in facts


def slow_padded_count(targets: list[list[int]]) -> int:
    """Count the padding in a loop over the rows."""
    ids = Counter(row[-1] for row in targets)
    padding, count = max(ids.items(), key=lambda item: item[1])
    if padding == -100 or 2 * count <= len(targets) or max(map(max, targets)) <= 1:
        return 0
    total = inside = 0
    for row in targets:
        run = 0
        while run < len(row) and row[-1 - run] == padding:
            run += 1
        total += run if run >= 3 else 0
        inside += row[: len(row) - run].count(padding)
    return 0 if inside > 0.1 * sum(row.count(padding) for row in targets) else total


def test_frequent_targets_are_no_padding() -> None:
    """Most words of a text are no entity, also those at the ends of sentences."""
    tags = torch.tensor([[0, 2, 0, 0, 0, 0], [3, 0, 0, 1, 0, 0], [0, 0, 0, 0, 0, 0]])
    assert padded_count(tags) == 0
    assert padded_count(torch.tensor([[4, 2, 3, 0, 0, 0], [3, 1, 4, 1, 0, 0], [1, 2, 0, 0, 0, 0]])) == 7


def test_padding_matches_a_loop_over_rows() -> None:
    generator = torch.Generator().manual_seed(0)
    totals = set()
    for _ in range(200):
        targets = torch.randint(0, 3, (3, 5), generator=generator)
        targets[:, int(torch.randint(1, 5, (), generator=generator)) :] = 2
        assert padded_count(targets) == slow_padded_count(targets.tolist())
        totals.add(padded_count(targets))
    assert len(totals) > 5


@pytest.mark.parametrize("last", [[[4, -100, -100, -100]] * 3, [[0, 1, 0, 0, 0]] * 3, [[1, 2, 3, 4], [5, 6, 7, 8]]])
def test_ignored_and_binary_targets_are_no_padding(last: list[list[int]]) -> None:
    assert target_facts([BatchPart(X, torch.tensor(last))])["padding_fraction"] == 0.0


def test_padding_is_a_share_of_all_targets() -> None:
    targets = torch.tensor([[5, 6, 9, 9, 9], [7, 8, 9, 9, 9]])
    assert target_facts([BatchPart(targets, targets)])["padding_fraction"] == 0.6
    assert "padding_fraction" not in target_facts([BatchPart(X, Y)])
