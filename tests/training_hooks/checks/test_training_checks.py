"""The hook training_checks against known mistakes and brute force."""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import loopscope
import pytest
import torch
from loopscope.hooks import HookPoint
from loopscope.training_hooks.checks import TrainingChecks
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support import Case, train

Metrics = dict[str, float]
ROWS, CLASSES = 8, 4
CHECKED = {1, 2, 3, 5, 10, 20}


class Net(nn.Module):
    """A network with a part that is never called, and a branch that ReLU can kill."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 12), nn.Linear(12, CLASSES)
        self.unused, self.dropout = nn.Linear(2, 2), nn.Dropout(0.1)

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.last(self.first(inputs).relu())
        return logits


def mean_loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def batches(steps: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(ROWS, 6, generator=generator), torch.randint(CLASSES, (ROWS,), generator=generator))
        for _ in range(steps)
    ]


def run(
    folder: Path,
    *,
    model: nn.Module | None = None,
    loss: Callable[[nn.Module, Any], Tensor] = mean_loss,
    data: list[Any] | None = None,
    zeroes: bool = True,
    accumulate: int = 1,
    clip: float = 0.0,
    lr: float = 0.01,
    prepare: Callable[[nn.Module], object] = lambda model: None,
    **options: Any,
) -> dict[int, Metrics]:
    """Train in a custom loop, and return the metrics of the hook by step."""
    model = Net() if model is None else model
    prepare(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    hook = TrainingChecks(**options)
    with loopscope.attach(
        model, optimizer, hooks=[hook], out=folder, accumulate=accumulate, display="none", sinks=["jsonl"], audit=True
    ) as scope:
        for index, batch in enumerate(scope.batches(data or batches(3 * accumulate)), start=1):
            scope.backward(loss(model, batch))
            if index % accumulate == 0:
                nn.utils.clip_grad_norm_(model.parameters(), clip) if clip else None
                optimizer.step()
                optimizer.zero_grad() if zeroes else None
    return read(folder)


def read(folder: Path) -> dict[int, Metrics]:
    """Return the metrics of the hook in a record, by step."""
    found: dict[int, Metrics] = {}
    for step, name, value in rows_of(loopscope.read_run(folder)):
        found.setdefault(step, {})[name] = value
    return found
