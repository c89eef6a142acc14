"""Observers of a model with complex parameters."""

import loopscope
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.support import RecordingSink

STEPS = 24


class ComplexModel(nn.Module):
    """A complex matrix, and a real layer on the absolute values of its products."""

    def __init__(self) -> None:
        super().__init__()
        self.mixing = nn.Parameter(torch.randn(4, 6, dtype=torch.complex64))
        self.output = nn.Linear(6, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.output((inputs.to(self.mixing.dtype) @ self.mixing).abs())
        return result


def norm(changes: list[Tensor]) -> float:
    """Return the norm over real and imaginary parts in float64."""
    return sum(float(change.abs().double().square().sum()) for change in changes) ** 0.5


def test_observers_measure_complex_parameters(tmp_path):
    """No hook fails or discards imaginary parts; lengths and singular values match those in complex numbers."""
    torch.manual_seed(0)
    model, sink = ComplexModel(), RecordingSink()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    start = [value.detach().clone() for value in model.parameters()]
    gradients: list[list[Tensor]] = []
    options = {"variance": {"window": STEPS, "every": STEPS}, "path_length": {"every": 1}}
    arguments = {"loss": nn.functional.mse_loss, "out": tmp_path / "run", "display": "none", "sinks": [sink]}
    path, inputs, targets = 0.0, torch.randn(STEPS, 8, 4), torch.randn(STEPS, 8, 1)
    with loopscope.attach(model, optimizer, with_hooks="observers", hook_options=options, **arguments) as scope:
        for batch in scope.batches(zip(inputs, targets, strict=True)):
            before = [value.detach().clone() for value in model.parameters()]
            scope.backward(nn.functional.mse_loss(model(batch[0]), batch[1]))
            gradients.append([value.grad.clone() for value in model.parameters()])
            optimizer.step()
            optimizer.zero_grad()
            path += norm([now.detach() - old for now, old in zip(model.parameters(), before, strict=True)])
    found = {name: value for name, _, _, value in sink.rows()}
    moved = [now.detach() - old for now, old in zip(model.parameters(), start, strict=True)]
    mean = [torch.stack(column).mean(0) for column in zip(*gradients, strict=True)]
    deviations = [one - other for step in gradients for one, other in zip(step, mean, strict=True)]
    singular = np.linalg.svd(model.mixing.detach().numpy(), compute_uv=False)
    expected = {
        "path_length/path_length": path,
        "path_length/displacement": norm(moved),
        "parameter_delta/total_delta": norm(moved),
        "parameter_delta/max_abs_delta": max(float(change.abs().max()) for change in moved),
        "variance/total_variance": norm(deviations) ** 2 / (STEPS - 1),
        "weight_tracking/spectral_norm/mixing": singular.max(),
        "weight_tracking/stable_rank/mixing": (singular**2).sum() / singular.max() ** 2,
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-5)
