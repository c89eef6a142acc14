"""A loop that reads ``scope.should_stop`` ends at a critical finding, and no other loop does."""

import json
import math
from pathlib import Path

import loopscope
import pytest
import torch
from torch import nn


def trained(folder: Path, factors: list[float], **options) -> tuple[list[bool], dict]:
    """Train with losses multiplied by these factors, and return the values of ``should_stop`` and the summary."""
    torch.manual_seed(0)
    model, values = nn.Linear(4, 1), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs = torch.randn(8, 4)
    with loopscope.attach(model, optimizer, out=folder, display="none", log_every=5, **options) as scope:
        values.append(scope.should_stop)
        for factor, batch in zip(factors, scope.batches([inputs] * len(factors)), strict=True):
            scope.backward((model(batch) - 1.0).square().mean() * factor)
            optimizer.step()
            optimizer.zero_grad()
            values.append(scope.should_stop)
    return values, json.loads((folder / "summary.json").read_text())


@pytest.mark.parametrize("loop", ["step", "epoch"])
def test_loss_that_is_nan_asks_to_stop(loop, tmp_path: Path) -> None:
    """The first steps are sound; the next delivery of metrics after the NaN reports it."""
    values, summary = trained(tmp_path / "run", [1.0] * 6 + [math.nan] * 6, loop=loop)
    assert not any(values[:7])
    assert values[-1]
    assert summary["status"] == "completed"
    assert "critical" in {finding["severity"] for finding in summary["findings"]}


def test_sound_training_does_not_ask_to_stop(tmp_path: Path) -> None:
    values, _ = trained(tmp_path / "run", [1.0] * 12)
    assert not any(values)


def test_finding_before_the_first_step_asks_to_stop(tmp_path: Path) -> None:
    """The run starts with its first batch, so the first step is made."""

    class Listed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head, self.blocks = nn.Linear(4, 1), [nn.Linear(4, 4) for _ in range(4)]

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                inputs = block(inputs)
            return self.head(inputs)

    model = Listed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with loopscope.attach(model, optimizer, out=tmp_path / "run", display="none") as scope:
        for batch in scope.batches([torch.ones(2, 4)]):
            scope.backward(model(batch).mean())
            optimizer.step()
            assert scope.should_stop
