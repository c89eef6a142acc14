"""Inputs that casts and divisions of whole numbers destroy."""

from collections.abc import Callable

import pytest
import torch
from loopscope.testing import check_training
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

ROWS, SIDE, CLASSES = 16, 6, 3


def check(images: Tensor, function: Callable[[Tensor], Tensor]) -> None:
    """Check a training on some of the images, which only a data set holds."""
    torch.manual_seed(0)
    dataset = TensorDataset(images, torch.arange(len(images)) % CLASSES)
    order = torch.randperm(len(images))[:ROWS].tolist()
    batch = [function(torch.stack([dataset[row][0] for row in order])), torch.arange(ROWS) % CLASSES]
    model = nn.Sequential(nn.Flatten(), nn.Linear(batch[0][0].numel(), CLASSES))
    check_training(model, lambda one, given: F.cross_entropy(one(given[0]), given[1]), batch, laws=["input_matters"])


def pixels() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (64, SIDE, SIDE, 3), generator=generator)
    images[:, 0, 0] = torch.tensor([255, 255, 0]) * (torch.arange(64) % 2)[:, None]
    return images.to(torch.uint8)


def values() -> Tensor:
    return torch.randn(64, 12, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("data", "function", "evidence"),
    [
        (pixels, lambda item: (item // 255).float(), "1/255 of the data: of 256 different values, 2 are left"),
        (pixels, lambda item: ((item // 255).float() - 0.5).movedim(-1, 1) / 0.5, "of 256 different values, 2"),
        (values, lambda item: item.int().float(), "the whole part of the data"),
        (values, lambda item: (item * 1e6).half().float(), "infinite values or NaN, and so have the outputs"),
        (pixels, lambda item: (item.int() // 256).float(), "all rows have equal inputs"),
    ],
    ids=["whole", "scaled", "casts", "overflow", "zeros"],
)
def test_inputs_that_are_lost(data: Callable[[], Tensor], function: Callable[[Tensor], Tensor], evidence: str) -> None:
    with pytest.raises(AssertionError, match=evidence):
        check(data(), function)


@pytest.mark.parametrize(
    ("data", "function"),
    [
        (pixels, lambda item: item.float() / 255),
        (pixels, lambda item: (item > 127).float()),
        (pixels, lambda item: (item // 64).float()),
        (values, lambda item: item.half().float()),
        (values, lambda item: (item > 0).float()),
        (values, lambda item: F.one_hot(item[:, 0].abs().long(), 8).float()),
    ],
    ids=["pixels", "ink", "levels", "half", "signs", "codes"],
)
def test_inputs_of_few_values_are_right(data: Callable[[], Tensor], function: Callable[[Tensor], Tensor]) -> None:
    check(data(), function)
