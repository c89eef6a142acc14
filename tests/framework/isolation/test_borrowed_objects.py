"""Read-only measurements do not change models that keep state in unusual places."""

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from loopscope.hooks import HookPoint
from loopscope.isolation import undone_in_modules
from loopscope.state import TrainingState, differing
from loopscope.training import TrainingTask, quiet_graph_breaks
from torch import Tensor, nn

from tests.support import MODELS, ActingHook, Case, ReadOnlyHook, SpyHook, at, train


@dataclass(slots=True)
class Seen:
    """State of a module, in slots."""

    count: int = 0
    mean: Tensor = field(default_factory=lambda: torch.zeros(4))


class Odd(nn.Sequential):
    """A model whose outputs depend on all state that its forward pass changes."""

    def prepare(self) -> "Odd":
        self.plain = torch.zeros(4)
        self.listed, self.named, self.queue = [torch.zeros(4)], {"a": {"b": torch.zeros(4)}}, deque([torch.zeros(4)], 2)
        self.aside = [nn.BatchNorm1d(4)]
        self.prompt = torch.zeros(4, requires_grad=True)
        self.calls, self.seen, self.array = 0, Seen(), np.zeros(4, np.float32)
        self.draws, self.bits = np.random.default_rng(1), torch.Generator().manual_seed(3)
        self.alias = [self[1].running_mean]
        self.register_forward_pre_hook(shift())
        return self

    def forward(self, inputs: Tensor) -> Tensor:
        mean = inputs.detach().mean(0)
        tensors = [self.plain, self.listed[0], self.named["a"]["b"], self.queue[-1], self.seen.mean, self.alias[0][:4]]
        with torch.no_grad():
            for index, tensor in enumerate(tensors):
                tensor.mul_(0.9).add_(mean * (index + 1))
            self.plain.data[0] += 0.5  # does not increment the version counter
        self.queue.append(mean.clone())
        self.calls += 1
        self.seen.count += 1
        self.array += mean.numpy()
        noise = torch.rand(4, generator=self.bits) + float(self.draws.random())
        shift = sum(tensors) + torch.from_numpy(self.array) + noise + 0.1 * self.calls + 0.1 * self.seen.count
        inputs = self.aside[0](inputs) if len(inputs) > 1 else inputs
        return super().forward(inputs + 0.01 * shift + self.prompt)


def shift() -> Any:
    """Return a hook that keeps a number and a tensor in its closure."""
    calls, total = 0, torch.zeros(4)

    def hook(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        nonlocal calls
        calls += 1
        total.add_(inputs[0].detach().mean(0))
        return (inputs[0] + 0.001 * calls + 0.001 * total,)

    return hook


class Meter:
    """The declared state of an experiment, which its loss changes."""

    def __init__(self) -> None:
        self.mean, self.count = torch.zeros(1), 0

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self.mean, "count": self.count}

    def load_state_dict(self, state: Any) -> None:
        self.mean.copy_(state["mean"])
        self.count = state["count"]


def make_odd(task: TrainingTask, state: TrainingState) -> None:
    task.model = state.model = Odd(*task.model).prepare()
    state.streams.owned += (task.model.bits,)
    state.extras["strategy"] = meter = Meter()
    task.optimizer.add_param_group({"params": [task.model.prompt]})
    compute_plain_loss = task.compute_loss

    def compute_loss(model: nn.Module, batch: Any) -> Tensor:
        loss = compute_plain_loss(model, batch)
        meter.mean.add_(loss.detach())
        meter.count += 1
        return loss * (1 + 0.01 * meter.mean.item())

    task.compute_loss = compute_loss


def product(run_ctx: Any, model_ctx: Any) -> Any:
    return model_ctx.hessian_vector_product({"0.bias": torch.ones(8)}, run_ctx.batch_data)


MEASUREMENTS = {
    "forward in train mode": SpyHook(lambda ctx: ctx.forward(ctx.batch_data[0], train=True) and None),
    "forward in eval mode": SpyHook(lambda ctx: ctx.forward(ctx.batch_data[0]) and None),
    "gradients for an observer": SpyHook(lambda ctx: ctx.compute_batch_gradients(ctx.batch_data) and None),
    "evaluation": SpyHook(lambda ctx: ctx.evaluate({}) and None),
    "loss": ReadOnlyHook(lambda run_ctx, model_ctx: model_ctx.compute_batch_loss() and None),
    "gradients": ReadOnlyHook(lambda run_ctx, model_ctx: model_ctx.compute_batch_gradients() and None),
    "gradients of the data": ReadOnlyHook(lambda run_ctx, model_ctx: model_ctx.compute_gradients() and None),
    "product": ReadOnlyHook(lambda run_ctx, model_ctx: product(run_ctx, model_ctx) and None),
    "epoch without steps": ReadOnlyHook(
        lambda run_ctx, model_ctx: model_ctx.run_training_epoch(model_ctx.loader, step=False) and None
    ),
}
BARE: list[Any] = []


@pytest.mark.some_rows(3)
@pytest.mark.longer
@pytest.mark.guarantee("observers-change-nothing")
@pytest.mark.parametrize("audit", [False, True])
@pytest.mark.parametrize("name", MEASUREMENTS)
def test_measuring_odd_models_changes_no_bytes(name: str, audit: bool) -> None:
    """Each measurement runs with and without audit on a model that keeps state in unusual places."""
    hook = MEASUREMENTS[name]
    if not BARE:
        BARE.append(train(Case(), steps=4, audit=False, introduce=make_odd))
    points = [HookPoint.POST_STEP, HookPoint.POST_BACKWARD]
    probe = at(type(hook), *points)(hook.probe if isinstance(hook, SpyHook) else hook.act)
    run = train(Case(), [probe], steps=4, audit=audit, introduce=make_odd)
    assert run.digests == BARE[0].digests
    assert run.final == BARE[0].final


def test_buffer_only_model_borrows_nothing_else() -> None:
    """A forward pass inside the context leaves the version of every tensor unchanged."""
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    versions = [tensor._version for tensor in model.state_dict().values()]
    with undone_in_modules([model]):
        model(torch.ones(3, 2))
    assert [tensor._version for tensor in model.state_dict().values()] == versions


class Renormed(nn.Module):
    """An embedding that shortens rows of its weight in every forward pass, before a separately compiled part."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 4, max_norm=0.5)
        self.head = torch.compile(nn.Linear(4, 7), backend="eager")
        self.register_buffer("spread", torch.ones(1).expand(7))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.embedding((inputs.abs() * 3).long().clamp(max=8)).mean(1)) * self.spread


@pytest.mark.compile
def test_renormed_and_compiled_modules_stay_unchanged(monkeypatch):
    """Evaluation, gradients, a training epoch and a branch leave the state digest of every step unchanged."""
    monkeypatch.setitem(MODELS, "renormed", Renormed)

    def measure(run_ctx, model_ctx):
        model_ctx.compute_batch_gradients()
        model_ctx.run_training_epoch(model_ctx.loader, step=False)

    def perturb(run_ctx, model_ctx):
        with model_ctx.branch(full=False):
            model_ctx.take_step(run_ctx.batch_data)

    def evaluate(model):
        return {"first": float(model(torch.rand(5, 4))[0, 0])}

    hooks = [
        SpyHook(lambda ctx: ctx.evaluate({}) and None),
        at(ReadOnlyHook, HookPoint.POST_BACKWARD)(measure),
        at(ActingHook, HookPoint.POST_BACKWARD)(perturb),
    ]
    case = Case("renormed")
    with quiet_graph_breaks():
        bare = train(case, steps=6, evaluate=evaluate).digests
        watched = train(case, hooks, steps=6, evaluate=evaluate, audit=True).digests
    assert [differing(*pair) for pair in zip(bare, watched, strict=True)] == [[]] * len(bare)
