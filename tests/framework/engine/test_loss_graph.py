"""Facts that the graph of a loss shows, for losses whose properties are known."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from loopscope.engine.loss_graph import describe_loss
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

ROWS, CLASSES = 4, 5
TARGETS = torch.tensor([0, 3, 1, 2])
WEIGHTS = nn.Parameter(torch.linspace(-1, 1, ROWS * CLASSES).reshape(ROWS, CLASSES))
COUNT = torch.tensor(4)


def logits() -> Tensor:
    return WEIGHTS * 1.5


def cross_entropy(values: Tensor | None = None, **options: Any) -> Tensor:
    return F.cross_entropy(logits() if values is None else values, TARGETS, **options)


LOSSES: dict[str, tuple[Callable[[], Tensor], tuple[str, float, bool, int]]] = {
    "mean": (cross_entropy, ("mean", 1, False, CLASSES)),
    "sum": (lambda: cross_entropy(reduction="sum"), ("sum", 1, False, CLASSES)),
    "sum of none": (lambda: cross_entropy(reduction="none").sum(), ("sum", 1, False, CLASSES)),
    "mean of none": (lambda: cross_entropy(reduction="none").mean(), ("mean", 1, False, CLASSES)),
    "sum by count": (lambda: cross_entropy(reduction="sum") / COUNT, ("sum", 1, True, CLASSES)),
    "sum by number": (lambda: cross_entropy(reduction="sum") / 4, ("sum", 4, False, CLASSES)),
    "mean by float": (lambda: cross_entropy() / 8.0, ("mean", 8, False, CLASSES)),
    "mean times share": (lambda: 0.25 * cross_entropy(), ("mean", 4, False, CLASSES)),
    "mean twice divided": (lambda: cross_entropy() / 2 / 4, ("mean", 8, False, CLASSES)),
    "smoothing": (lambda: cross_entropy(label_smoothing=0.1), ("mean", 1, False, CLASSES)),
    "probabilities": (lambda: F.cross_entropy(logits(), torch.ones(ROWS, CLASSES)), ("mean", 1, False, CLASSES)),
    "nll": (lambda: F.nll_loss(F.log_softmax(logits(), -1), TARGETS), ("mean", 1, False, CLASSES)),
    "gather": (lambda: -F.log_softmax(logits(), -1).gather(1, TARGETS[:, None]).mean(), ("mean", 1, False, CLASSES)),
    "converted": (lambda: cross_entropy(logits().double()).float(), ("mean", 1, False, CLASSES)),
    "with penalty": (lambda: 0.1 * WEIGHTS.square().sum() + cross_entropy(), ("mean", 1, False, CLASSES)),
    "mean of losses": (lambda: torch.stack([cross_entropy(), cross_entropy()]).mean(), ("mean", 1, False, CLASSES)),
    "sum of losses": (lambda: torch.stack([cross_entropy(), cross_entropy()]).sum(), ("mean", 1, False, CLASSES)),
    "mse": (lambda: F.mse_loss(logits(), torch.zeros(ROWS, CLASSES)), ("mean", 1, False, 0)),
    "bce": (lambda: F.binary_cross_entropy(logits().sigmoid(), torch.ones(ROWS, CLASSES)), ("mean", 1, False, 0)),
    "huber": (lambda: F.huber_loss(logits(), torch.zeros(ROWS, CLASSES), reduction="sum"), ("sum", 1, False, 0)),
    "kl": (lambda: F.kl_div(F.log_softmax(logits(), -1), torch.ones(ROWS, CLASSES)), ("mean", 1, False, 0)),
    "own": (lambda: logits().square().sum() / 2, ("sum", 2, False, 0)),
    "norm": (lambda: logits().norm(), ("", 1, False, 0)),
}


@pytest.mark.filterwarnings("ignore:reduction")
@pytest.mark.parametrize("name", LOSSES)
def test_graph_shows_reduction_divisor_and_classes(name: str) -> None:
    compute, expected = LOSSES[name]
    found = describe_loss(compute())
    assert (found.reduction, found.divisor, found.is_divided_by_tensor, found.class_count) == expected
    assert found.leftover_gradients == ()
    assert not found.is_doubly_normalised


@pytest.mark.parametrize("convert", [lambda x: x, lambda x: x.float(), lambda x: x.view(2, 2, -1).flatten(0, 1)])
def test_softmax_before_log_softmax_is_found(convert: Callable[[Tensor], Tensor]) -> None:
    assert describe_loss(cross_entropy(convert(logits().softmax(-1).double()))).is_doubly_normalised
    assert not describe_loss(cross_entropy(convert(logits().double()))).is_doubly_normalised


def test_sigmoid_before_bce_with_logits_is_found() -> None:
    targets = torch.ones(ROWS, CLASSES)
    assert describe_loss(F.binary_cross_entropy_with_logits(logits().sigmoid(), targets)).is_doubly_normalised
    assert not describe_loss(F.binary_cross_entropy_with_logits(logits(), targets)).is_doubly_normalised


def test_path_has_names_and_a_limit() -> None:
    loss = cross_entropy() / 2
    assert describe_loss(loss).loss_operations[:3] == ("DivBackward0", "NllLossBackward0", "LogSoftmaxBackward0")
    for _ in range(20):
        loss = loss + 1
    assert describe_loss(loss).loss_operations == ("AddBackward0",) * 12


def test_classes_of_images_are_in_dimension_one() -> None:
    pixels = nn.Parameter(torch.zeros(2, 3, 4, 5))
    assert describe_loss(F.cross_entropy(pixels, torch.zeros(2, 4, 5, dtype=torch.int64))).class_count == 3


def test_float16_on_the_path_is_found() -> None:
    assert describe_loss(cross_entropy(logits().half().float())).is_float16
    assert not describe_loss(cross_entropy(logits().bfloat16().float())).is_float16


def test_factor_of_a_loss_scaler_is_skipped() -> None:
    loss = cross_entropy() / 4 * torch.tensor(65536.0)
    assert describe_loss(loss, is_scaled=True).divisor == 4
    assert describe_loss(loss).is_divided_by_tensor


def test_reading_runs_no_checkpointed_region_again() -> None:
    calls = []

    def region(values: Tensor) -> Tensor:
        calls.append(1)
        return cross_entropy(values * 2) / 4

    loss = checkpoint(region, logits(), use_reentrant=False)
    found = describe_loss(loss)
    assert (len(calls), found.reduction, found.class_count, found.divisor) == (1, "mean", CLASSES, 4.0)


def test_freed_graph_is_still_described() -> None:
    loss = cross_entropy() / 4
    loss.backward()
    found = describe_loss(loss)
    assert (found.reduction, found.class_count, found.is_divided_by_tensor) == ("mean", CLASSES, False)


class Doubled(torch.autograd.Function):
    """A custom function with one input."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return values * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


def test_unknown_operations_are_no_error() -> None:
    through = describe_loss(Doubled.apply(cross_entropy()))
    assert (through.loss_operations[0], through.reduction) == ("DoubledBackward", "mean")
    assert describe_loss(WEIGHTS.detach().sum().requires_grad_()).loss_operations == ()
    parameter = nn.Parameter(torch.ones(()))
    assert describe_loss(parameter).reduction == ""
