"""Steps that a loss scaler skips leave no trace in windows of gradients."""

import json
import math

import loopscope
import pytest
import torch
from loopscope import training_hooks  # noqa: F401 - fills the registry
from torch import nn

pytestmark = pytest.mark.longer

OPTIONS = {
    "variance": {"window": 4, "every": 8},
    "batch_dynamics": {"history": 8, "every": 9},
    "subspace_gradient_info": {"window": 4, "top": 2, "every": 1},
    "training_diagnostics": {"window": 8, "lags": 1},
}

SERIES = [
    # The mean of steps 9 to 12 does not exist, so that of steps 13 to 16 has none to compare with.
    ("consecutive", {"interval": 4}, "cosine", [8, 20, 32]),
    ("consecutive", {"interval": 5}, "cosine", [10, 35]),
    ("variance", {"window": 4, "every": 2}, "successive_ratio", [4, 6, 8, 10, 16, 18, 20, 22, 28, 30, 32, 34, 40]),
    ("variance", {"window": 4, "every": 5}, "successive_ratio", [4, 9, 19, 29, 34]),
    ("hessian", {"burst_length": 5, "every_n_steps": 10}, "entanglement_cosine",
     [2, 3, 4, 5, 12, 14, 15, 22, 23, 24, 32, 33, 34, 35]),
]  # fmt: skip


class Probing(torch.amp.GradScaler):
    """A scaler whose scale is too large at every twelfth step."""

    steps = 0

    def scale(self, outputs):
        Probing.steps += 1
        if Probing.steps % 12 == 0:
            self._scale.fill_(2.0**126)
        return super().scale(outputs)


def half_loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.float16):
        return model(x).float().square().mean()


def recorded(folder, hook: str, options: dict[str, int]) -> dict[str, dict[int, float]]:
    """Train 40 steps, of which the scaler skips 12, 24 and 36; return the values of a hook by metric and step."""
    torch.manual_seed(0)
    Probing.steps = 0
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = Probing("cpu", init_scale=4.0)
    data = [torch.randn(16, 4) for _ in range(40)]
    settings = {"out": folder, "display": "none", "hooks": [hook], "hook_options": {hook: options}}
    with loopscope.attach(model, optimizer, scaler=scaler, loss=half_loss, loop="step", length=40, **settings) as scope:
        for x in scope.batches(data):
            scope.backward(half_loss(model, x))
            scaler.step(optimizer)
            scaler.update(4.0)
            optimizer.zero_grad()
    numbers: dict[str, dict[int, float]] = {}
    for line in (folder / f"{folder.name}.jsonl").read_text().splitlines():
        row = json.loads(line)
        for name, value in row.items():
            if name.startswith(f"{hook}/"):
                steps, values = (
                    (value["steps"], value["values"]) if isinstance(value, dict) else ([row["step"]], [value])
                )
                numbers.setdefault(name.removeprefix(f"{hook}/"), {}).update(zip(steps, values, strict=True))
    return numbers


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("hook", OPTIONS)
def test_skipped_steps_are_left_out(hook, tmp_path):
    numbers = recorded(tmp_path / "run", hook, OPTIONS[hook])
    assert numbers
    plain = [value for column in numbers.values() for value in column.values() if isinstance(value, (int, float, str))]
    assert all(isinstance(value, (int, float)) and math.isfinite(value) for value in plain), numbers


@pytest.mark.some_rows(3)
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("hook", "options", "metric", "steps"), SERIES)
def test_no_pair_spans_a_skipped_step(hook, options, metric, steps, tmp_path):
    """Intervals, windows and bursts of successive steps start again after a step that the scaler skips."""
    assert list(recorded(tmp_path / "run", hook, options)[metric]) == steps


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_skipped_step_restarts_a_history(tmp_path):
    """At the end of its bursts the hook has the gradients since the skipped steps 12 and 24."""
    found = recorded(tmp_path / "run", "batch_dynamics", {"history": 8, "every": 9})["gradients"]
    assert {step: found[step] for step in (8, 17, 26, 35)} == {8: 8, 17: 5, 26: 2, 35: 8}
