"""An evaluation within a run leaves the stochastic rounding of the next steps as it was."""

import loopscope
import pytest
import torch
from loopscope.lowbit import quantize_model
from torch import nn


def losses(folder, recipe: str, *, evaluates: bool) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
    quantize_model(model, recipe, seed=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = list(torch.randn(4, 16, 32, generator=torch.Generator().manual_seed(1)))
    found = []
    with loopscope.attach(model, optimizer, hooks=["weight_updates"], out=folder, display="none") as scope:
        for x in scope.batches(data):
            loss = model(x).square().mean()
            scope.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
            if evaluates:
                scope.evaluate(lambda: {"size": model(torch.ones(4, 32)).abs().max().item()})
    return found


@pytest.mark.some_rows(3)
@pytest.mark.longer
@pytest.mark.parametrize("recipe", ["nvfp4", "e2m1/nvfp4/stochastic", "fp4_block"])
def test_evaluations_of_a_run_move_no_rounding(recipe, tmp_path):
    plain = losses(tmp_path / "plain", recipe, evaluates=False)
    assert losses(tmp_path / "evaluated", recipe, evaluates=True) == plain
