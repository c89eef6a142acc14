from contextlib import suppress

import pytest
import torch
from torch import nn

from framework.audit import Audit
from framework.borrowing import lent_buffers, lent_gradients, lent_modes
from tests.support import Case, Mishap, build
from tests.vandals import Scene, train_one_step


class Remembering(nn.Module):
    """A module that keeps its last output and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        self.last = self.norm(x)
        return self.last


@pytest.mark.parametrize("raises", [False, True])
def test_a_forward_pass_leaves_no_trace_in_buffers_and_attributes(raises):
    model = Remembering()
    table, buffers = model._buffers, dict(model.norm._buffers)
    with suppress(Mishap), lent_buffers(model):
        model(torch.randn(3, 4))
        assert model.calls == 1
        assert model.norm.num_batches_tracked == 1
        if raises:
            raise Mishap
    assert model.calls == 0
    assert "last" not in vars(model)
    assert model._buffers is table
    assert all(model.norm._buffers[name] is buffer for name, buffer in buffers.items())
    assert model.norm.num_batches_tracked == 0


def test_a_buffer_that_two_modules_share_is_shared_while_lent():
    first, second = nn.Module(), nn.Module()
    shared = torch.zeros(2)
    first.register_buffer("shared", shared)
    second.register_buffer("shared", shared)
    with lent_buffers(nn.ModuleList([first, second])):
        first.shared.add_(1)
        assert second.shared.tolist() == [1, 1]
    assert first.shared is second.shared is shared
    assert shared.tolist() == [0, 0]


@pytest.mark.parametrize("train", [True, False, None])
def test_modes_come_back_module_by_module(train):
    model = nn.Sequential(nn.Linear(1, 1), nn.Dropout(), nn.Dropout())
    model[1].eval()
    with suppress(Mishap), lent_modes(model, train=train):
        assert [module.training for module in model] == ([True, False, True] if train is None else [train] * 3)
        model.train()
        raise Mishap
    assert [module.training for module in model] == [True, False, True]


def test_gradients_come_back_as_the_same_tensors():
    model = nn.Linear(2, 1)
    model(torch.ones(2)).backward()
    model.bias.grad = None
    gradient = model.weight.grad
    with suppress(Mishap), lent_gradients(model):
        assert model.weight.grad is None
        model(torch.ones(2)).backward()
        raise Mishap
    assert model.weight.grad is gradient
    assert model.bias.grad is None
    assert gradient.tolist() == [[1, 1]]


@pytest.mark.parametrize("model", ["batchnorm_mlp", "transformer", "tied"])
def test_under_audit_a_borrowed_pass_is_no_change(model):
    task, state = build(Case(model))
    scene = Scene(task, state)
    train_one_step(scene)
    audit = Audit(state, enabled=True)
    audit.begin()
    with (
        state.streams.isolated(),
        lent_buffers(task.model),
        lent_modes(task.model, train=True),
        lent_gradients(task.model),
    ):
        task.compute_loss(task.model, scene.batch).backward()
    audit.check("Nobody")
