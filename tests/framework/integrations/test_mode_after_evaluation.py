"""A function that leaves eval mode on is reported, since ``scope.evaluate`` restores train mode."""

import json
from collections.abc import Callable
from pathlib import Path

import loopscope
import pytest
import torch
from torch import nn

TRAIN = nn.Module.train

Validate = Callable[[nn.Module], dict[str, float]]


def loss_of(model: nn.Module) -> dict[str, float]:
    return {"val_loss": float(model(torch.ones(2, 4)).square().mean())}


def leaves_eval(model: nn.Module) -> dict[str, float]:
    model.eval()
    return loss_of(model)


def returns_to_train(model: nn.Module) -> dict[str, float]:
    numbers = leaves_eval(model)
    model.train()
    return numbers


def recorded(out: Path) -> list[tuple[str, int]]:
    """Return severity and first step of the finding in the record, if any."""
    findings = json.loads((out / "summary.json").read_text())["findings"]
    return [(item["severity"], item["step"]) for item in findings if item["id"] == "model-in-eval-mode"]


def train(
    out: Path, validate: Validate, *, trains: bool, first: bool = False, layer: nn.Module | None = None
) -> list[tuple[str, int]]:
    """Train with an evaluation after each epoch, and before the ``first``; return the finding."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5) if layer is None else layer, nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with loopscope.attach(model, optimizer, with_hooks="health", out=out, display="none") as scope:
        for epoch in range(3):
            if first and not epoch:
                model.train()
                scope.evaluate(validate, model)
            for batch in scope.batches(torch.randn(3, 2, 4)):
                if trains:
                    model.train()
                scope.backward(model(batch).square().mean())
                optimizer.step()
                assert nn.Module.train is TRAIN
                optimizer.zero_grad()
            scope.evaluate(validate, model)
    assert nn.Module.train is TRAIN
    assert model.training
    return recorded(out)


@pytest.mark.filterwarnings("ignore::loopscope.hooks.Alert")
@pytest.mark.parametrize(
    ("validate", "trains", "expected"),
    [
        (leaves_eval, False, [("warning", 4)]),
        (leaves_eval, True, []),
        (returns_to_train, False, []),
        (loss_of, False, []),
    ],
)
def test_missing_train_after_evaluation_is_found(tmp_path, validate, trains, expected) -> None:
    assert train(tmp_path / "run", validate, trains=trains) == expected


@pytest.mark.filterwarnings("ignore::loopscope.hooks.Alert")
def test_an_evaluation_before_training_counts(tmp_path: Path) -> None:
    """The first evaluation comes before the run has start-up facts; the second one is reported."""
    assert train(tmp_path / "run", leaves_eval, trains=False, first=True) == [("warning", 4)]


@pytest.mark.filterwarnings("ignore::loopscope.hooks.Alert")
def test_models_without_modes_are_not_reported(tmp_path: Path) -> None:
    assert train(tmp_path / "run", leaves_eval, trains=False, layer=nn.ReLU()) == []


@pytest.mark.filterwarnings("ignore::loopscope.hooks.Alert")
def test_evaluation_within_another_counts_once(tmp_path: Path) -> None:
    """The inner evaluation leaves eval mode on, and the outer one calls no mode."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with loopscope.attach(model, optimizer, with_hooks="health", out=tmp_path / "run", display="none") as scope:
        for _ in range(2):
            for batch in scope.batches(torch.randn(3, 2, 4)):
                scope.backward(model(batch).square().mean())
                optimizer.step()
                optimizer.zero_grad()
            scope.evaluate(lambda: scope.evaluate(leaves_eval, model))
    assert recorded(tmp_path / "run") == [("warning", 4)]
