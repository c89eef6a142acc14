"""Passes through the model in transforms of torch.func and with fake tensors, in a loop with taps."""

from collections.abc import Callable
from typing import Any

import loopscope
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call, grad, hessian, jacrev, jvp, vjp, vmap

QUIET: dict[str, Any] = {"display": "none", "overwrite": True}
Weights = dict[str, Tensor]


def loss_of(model: nn.Module, weights: Weights, rows: Tensor) -> Tensor:
    return functional_call(model, weights, (rows,)).square().mean()


def per_sample(model: nn.Module, weights: Weights, rows: Tensor) -> object:
    return vmap(grad(lambda weights, row: loss_of(model, weights, row[None])), (None, 0))(weights, rows)


def mapped(model: nn.Module, weights: Weights, rows: Tensor) -> object:
    return vmap(lambda row: functional_call(model, weights, (row[None],)))(rows)


def nested(model: nn.Module, weights: Weights, rows: Tensor) -> object:
    return vmap(vmap(lambda row: functional_call(model, weights, (row[None],))))(rows.view(2, 2, -1))


def jacobian(model: nn.Module, weights: Weights, rows: Tensor) -> object:
    return jacrev(lambda weights: loss_of(model, weights, rows))(weights)


def forward_mode(model: nn.Module, weights: Weights, rows: Tensor) -> object:
    return jvp(lambda weights: loss_of(model, weights, rows), (weights,), (weights,))


def reverse_mode(model: nn.Module, weights: Weights, rows: Tensor) -> object:
    return vjp(lambda weights: loss_of(model, weights, rows), weights)[1](torch.ones(()))


def second_order(model: nn.Module, weights: Weights, rows: Tensor) -> object:
    return hessian(lambda row: functional_call(model, weights, (row[None],)).sum())(rows[0])


def fake(model: nn.Module, weights: Weights, rows: Tensor) -> object:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        return model(mode.from_tensor(rows)).sum()


PASSES: list[Callable[..., object]] = [
    per_sample,
    mapped,
    nested,
    jacobian,
    forward_mode,
    reverse_mode,
    second_order,
    fake,
]


@pytest.mark.filterwarnings("ignore::loopscope.hooks.Alert", "ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize("symbolic", PASSES)
@pytest.mark.parametrize("hook", ["gradient_flow", "gradient_overflow"])
def test_taps_leave_out_symbolic_passes(tmp_path, hook, symbolic):
    """A loop that also transforms the model trains to the end, and its hooks report their own steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with loopscope.attach(model, optimizer, hooks=[hook], out=tmp_path / "run", **QUIET) as scope:
        for rows in scope.batches(torch.randn(12, 4).split(4)):
            symbolic(model, {name: item.detach() for name, item in model.named_parameters()}, rows)
            scope.backward(model(rows).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    assert any(name.startswith(f"{hook}/") for name in loopscope.read_run(tmp_path / "run").names)
