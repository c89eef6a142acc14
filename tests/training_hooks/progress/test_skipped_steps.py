"""Steps that a loss scaler skips leave no trace in windows of gradients."""

import json
import math

import loopscope
import pytest
import torch
from loopscope import training_hooks  # noqa: F401 - fills the registry
from torch import nn

OPTIONS = {
    "variance": {"window": 4, "every": 8},
    "batch_dynamics": {"history": 8, "every": 9},
    "subspace_gradient_info": {"window": 4, "top": 2, "every": 1},
    "training_diagnostics": {"window": 8, "lags": 1, "update_every": 2},
}


class Probing(torch.amp.GradScaler):
    """A scaler whose scale is too large at every twelfth step."""

    steps = 0

    def scale(self, outputs):
        Probing.steps += 1
        if Probing.steps % 12 == 0:
            self._scale.fill_(2.0**126)
        return super().scale(outputs)


def recorded(folder, hook: str, *, scaled: bool = True) -> dict[str, list[float]]:
    """Train 40 steps and return the finite and other numbers of a hook by metric."""
    torch.manual_seed(0)
    Probing.steps = 0
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = Probing("cpu", init_scale=4.0) if scaled else None
    data = [torch.randn(16, 4) for _ in range(40)]
    options = {"out": folder, "display": "none", "hooks": [hook], "hook_options": {hook: OPTIONS[hook]}}
    with loopscope.attach(model, optimizer, scaler=scaler, **options) as scope:
        for x in scope.batches(data):
            with torch.autocast("cpu", torch.float16, enabled=scaled):
                loss = model(x).float().square().mean()
            scope.backward(loss)
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update(4.0)
            optimizer.zero_grad()
    numbers: dict[str, list[float]] = {}
    for line in (folder / f"{folder.name}.jsonl").read_text().splitlines():
        for name, value in json.loads(line).items():
            if name.startswith(hook):
                column = value["values"] if isinstance(value, dict) else value
                numbers.setdefault(name, []).extend(column if isinstance(column, list) else [column])
    return numbers


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("hook", OPTIONS)
def test_skipped_steps_are_left_out(hook, tmp_path):
    numbers = recorded(tmp_path / "run", hook, scaled=True)
    assert numbers
    plain = [value for column in numbers.values() for value in column if isinstance(value, (int, float, str))]
    assert all(isinstance(value, (int, float)) and math.isfinite(value) for value in plain), numbers
