"""Copies and pickles of a model that are made within the loop have none of the run's hooks."""

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import loopscope
import pytest
import torch
from torch import Tensor, nn

INPUTS = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))


def train(folder: Path, within: Callable[[nn.Module], Any], group: str) -> list[Any]:
    """Train three steps and call ``within`` on the model after each forward pass.

    Returns:
        The results, and two metrics of activations.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    results = []
    with loopscope.attach(model, optimizer, with_hooks=group, out=folder, display="none") as scope:
        for batch in scope.batches([INPUTS] * 3):
            loss = model(batch).square().mean()
            results.append(within(model))
            scope.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    return [*results, *(scope.last_metrics()[f"activations/rms/{name}"] for name in ("0", "2"))]


def outputs_of(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(INPUTS)


@pytest.mark.some_rows(2)
@pytest.mark.parametrize("group", ["health", "observers"])
def test_models_can_be_pickled_within_the_loop(tmp_path: Path, group: str) -> None:
    """The pickle needs no loopscope, and gives the same outputs."""

    def pickled(model: nn.Module) -> bool:
        content = pickle.dumps(model)
        return b"loopscope" not in content and torch.equal(outputs_of(pickle.loads(content)), outputs_of(model))

    assert train(tmp_path / "run", pickled, group)[:3] == [True] * 3


def test_passes_of_a_copy_are_not_counted(tmp_path: Path) -> None:
    """An average of weights is a copy, whose passes are not those of the model."""

    def passed(model: nn.Module) -> None:
        copied = copy.deepcopy(model)
        copied(100 * INPUTS).sum().backward()

    plain = train(tmp_path / "plain", lambda model: None, "health")
    assert train(tmp_path / "copied", passed, "health") == plain


def test_copies_can_be_saved_after_the_run(tmp_path: Path) -> None:
    copies = train(tmp_path / "run", copy.deepcopy, "health")[:3]
    for model in copies:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        assert torch.equal(outputs_of(torch.load(file, weights_only=False)), outputs_of(model))
