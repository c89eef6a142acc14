"""Metrics of losses from descriptions of their backward passes."""

import math
from collections.abc import Callable

import pytest
import torch
from loopscope.doctor.senses import BackwardPass
from loopscope.doctor.senses.loss_graph import describe_loss
from loopscope.training_hooks.checks.loss_facts import averages, is_summed, loss_facts
from torch import Tensor
from torch.nn import functional as F


@pytest.mark.parametrize(
    ("divisor", "micro_batches", "rows", "expected"),
    [
        (1, 1, 32, True),
        (2, 1, 32, True),  # ½·Σx²
        (4, 4, 32, True),  # the sum of each of 4 micro-batches, averaged over them
        (32, 1, 32, False),
        (128, 4, 32, False),
        (2, 1, 2, False),
        (1, 1, 1, True),
        (1, 1, 0, True),  # unknown rows
        (512, 1, 0, False),
    ],
)
def test_rows_distinguish_sums_from_means(divisor: float, micro_batches: int, rows: int, expected: bool) -> None:
    assert is_summed(BackwardPass(reduction="sum", divisor=divisor), micro_batches, rows) == expected


def test_means_and_sums_by_tokens_are_not_summed() -> None:
    assert not is_summed(BackwardPass(reduction="mean"), 1, 32)
    assert not is_summed(BackwardPass(reduction="sum", is_divided_by_tensor=True), 1, 32)
    assert not is_summed(BackwardPass(), 1, 32)


def mse(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.mse_loss(outputs, targets)


def summed_squares(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.mse_loss(outputs, targets, reduction="sum")


ACCUMULATED: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], bool | None]] = {
    "divided": (lambda x, y: mse(x, y) / 3, True),
    "multiplied by the inverse": (lambda x, y: mse(x, y) * (1 / 3), True),
    "half": (lambda x, y: 0.5 * mse(x, y) / 3, True),
    "half by hand": (lambda x, y: 0.5 * (x - y).square().mean() / 3, True),
    "halved first": (lambda x, y: mse(x, y) / 2 / 3, True),
    "ten times": (lambda x, y: 10 * mse(x, y) / 3, True),
    "two terms": (lambda x, y: (0.1 * mse(x, y) + 0.9 * F.l1_loss(x, y)) / 3, True),
    "two divided terms": (lambda x, y: 0.1 * mse(x, y) / 3 + 0.9 * F.l1_loss(x, y) / 3, True),
    "sum by rows": (lambda x, y: summed_squares(x, y) / 8 / 3, True),
    "half of the sum by elements": (lambda x, y: 0.5 * summed_squares(x, y) / 32 / 3, True),
    "factor joins both": (lambda x, y: mse(x, y) * (0.5 / 3), None),
    "large factor joins both": (lambda x, y: mse(x, y) * (10 / 3), None),
    "not divided": (mse, False),
    "three times": (lambda x, y: 3 * mse(x, y) / 3, False),
    "half not divided": (lambda x, y: 0.5 * mse(x, y), False),
    "ten times, not divided": (lambda x, y: 10 * mse(x, y), False),
    "divided twice": (lambda x, y: mse(x, y) / 3 / 3, False),
    "divided by the square": (lambda x, y: mse(x, y) / 9, False),
    "sum": (lambda x, y: summed_squares(x, y) / 3, False),
    "mean of the own rows": (lambda x, y: summed_squares(x, y) / 8, False),
}


@pytest.mark.parametrize("name", ACCUMULATED)
def test_constant_weights_are_no_missing_division(name: str) -> None:
    """Of three micro-batches of 8 rows with 4 numbers."""
    loss, expected = ACCUMULATED[name]
    outputs = [torch.ones(8, 4, requires_grad=True) * 2 for _ in range(3)]
    assert averages([describe_loss(loss(item, torch.zeros(8, 4))) for item in outputs], 8) is expected


@pytest.mark.parametrize(
    ("divisors", "expected"), [([1.75, 7 / 3], True), ([2.0, 4.0], None), ([2.0, 2.0, 2.0], False)]
)
def test_weights_of_averaged_micro_batches_add_up(divisors: list[float], expected: bool | None) -> None:
    passes = [BackwardPass(reduction="mean", divisor=item, divisions=(item,)) for item in divisors]
    assert averages(passes) is expected


def test_tokens_average_micro_batches() -> None:
    assert averages([BackwardPass(is_divided_by_tensor=True)] * 2)
    assert averages([BackwardPass(is_divided_by_tensor=True), BackwardPass()]) is None


@pytest.mark.parametrize(
    ("counts", "divisors", "expected"),
    [
        ([10, 20], [30, 30], True),
        ([10, 20], [10, 20], False),
        ([10, 20], [20, 40], True),
        ([10, 20], [1, 1], False),
        ([None, None], [30, 30], True),
        ([None, None], [1, 1], False),
    ],
    ids=["tokens of the step", "own tokens", "own tokens twice", "no division", "unknown tokens", "unknown sums"],
)
def test_sums_are_weighted_by_targets(counts: list[int | None], divisors: list[float], expected: bool) -> None:
    passes = [
        BackwardPass(reduction="sum", divisor=divisor, divisions=(divisor,), target_count=count)
        for count, divisor in zip(counts, divisors, strict=True)
    ]
    assert averages(passes) is expected


def test_frequencies_need_all_micro_batches() -> None:
    """The loss of predicting the frequencies is the mean over all micro-batches."""
    known = BackwardPass(reduction="mean", class_count=10, constant_loss=2.0)
    assert loss_facts([known, known._replace(constant_loss=1.0)])["constant_loss"] == 1.5
    assert "constant_loss" not in loss_facts([known, known._replace(constant_loss=None)])


def test_facts_of_a_cross_entropy() -> None:
    facts = loss_facts([BackwardPass(reduction="mean", class_count=10, divisor=2.0)] * 2)
    assert facts["uniform_loss"] == math.log(10)
    assert (facts["micro_batches"], facts["loss_divisor"], facts["averages_micro_batches"]) == (2, 2.0, 1)
    assert "uniform_loss" not in loss_facts([BackwardPass()])
    assert loss_facts([]) == {}


def test_unknown_reductions_have_no_averages() -> None:
    """Sums of terms that the graph does not explain, such as label smoothing of a trainer."""
    assert "averages_micro_batches" not in loss_facts([BackwardPass()] * 4)
    assert loss_facts([BackwardPass(reduction="mean", divisor=4.0)] * 4)["averages_micro_batches"] == 1
