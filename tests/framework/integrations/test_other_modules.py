"""Modules of a training outside of its model: hooks leave them unchanged, whether they are declared or found."""

import copy
import hashlib
import json
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import loopscope
import pytest
import torch
from loopscope.errors import StateMutationError, UsageError
from torch import Tensor, nn
from torch.nn.functional import linear, mse_loss, softplus

from tests.support import ActingHook, SpyHook

QUIET: dict[str, Any] = {"display": "none", "overwrite": True}
Loss = Callable[[nn.Module, Tensor], Tensor]


def network(inputs: int = 4, outputs: int = 1) -> nn.Module:
    layers = (nn.Linear(inputs, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, outputs))
    return nn.Sequential(*layers)


def critic() -> tuple[dict[str, nn.Module], Loss]:
    other = network()
    return {"other": other}, lambda model, batch: softplus(-other(model(batch))).mean()


def teacher_without_gradient() -> tuple[dict[str, nn.Module], Loss]:
    other = network(4, 4)

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        with torch.no_grad():
            target = other(batch)
        return mse_loss(model(batch), target)

    return {"other": other}, loss


def trained_teacher() -> tuple[dict[str, nn.Module], Loss]:
    other = network(4, 4)
    return {"other": other}, lambda model, batch: mse_loss(model(batch), other(batch))


def weight_without_module_call() -> tuple[dict[str, nn.Module], Loss]:
    other = nn.Linear(4, 1)
    return {"other": other}, lambda model, batch: linear(model(batch), other.weight).square().mean()


def normalisation_without_parameters() -> tuple[dict[str, nn.Module], Loss]:
    other = nn.BatchNorm1d(4, affine=False)
    return {"other": other}, lambda model, batch: other(model(batch)).pow(4).mean()


def learned_temperature() -> tuple[dict[str, nn.Module], Loss]:
    other = nn.ParameterDict({"temperature": nn.Parameter(torch.ones(()))})
    return {"other": other}, lambda model, batch: (model(batch) * other["temperature"]).square().mean()


def gradient_penalty() -> tuple[dict[str, nn.Module], Loss]:
    other = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        made = model(batch)
        (slope,) = torch.autograd.grad(other(made).sum(), made, create_graph=True)
        return other(made).mean() + (slope.norm(dim=1) - 1).square().mean()

    return {"other": other}, loss


KINDS = {
    make.__name__: make
    for make in (
        critic,
        teacher_without_gradient,
        trained_teacher,
        weight_without_module_call,
        normalisation_without_parameters,
        learned_temperature,
        gradient_penalty,
    )
}


def train(kind: str, tmp_path: Any = None, hooks: Any = (), *, declared: bool = False) -> list[str]:
    """Train a model, then another module, on every batch; return a digest of both, with gradients, per step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    others, loss = KINDS[kind]()
    also = {"also": copy.copy(others)} if declared else {}
    optimizers = [
        torch.optim.Adam(item.parameters(), 1e-2) for item in (model, *others.values()) if [*item.parameters()]
    ]
    given = {"hooks": hooks, "loss": loss, "out": tmp_path, **also, **QUIET}
    with loopscope.attach(model, optimizers[0], **given) if hooks else nullcontext() as scope:
        digests, data = [], torch.randn(24, 4).split(6)
        for batch in scope.batches(data) if scope else data:
            value = loss(model, batch)
            scope.backward(value) if scope else value.backward()
            digests.append(digest_of(model, *others.values()))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    return digests


def digest_of(*modules: nn.Module) -> str:
    tensors = [t for m in modules for t in (*m.parameters(), *m.buffers(), *(p.grad for p in m.parameters()))]
    return hashlib.md5(b"".join(b"" if t is None else t.detach().numpy().tobytes() for t in tensors)).hexdigest()


@pytest.mark.some_rows(3)
@pytest.mark.longer
@pytest.mark.guarantee("attached-loops-keep-their-bytes")
@pytest.mark.parametrize("declared", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_hooks_leave_other_modules_unchanged(tmp_path, kind, declared):
    """Gradients, weights and running statistics of both networks are those of the loop without hooks, at every step."""
    assert train(kind, tmp_path / "run", ["hessian", "batch_rows"], declared=declared) == train(kind)


@pytest.mark.longer
@pytest.mark.parametrize(("kind", "names"), [("critic", {"other"}), ("learned_temperature", {"tensors of the loss"})])
def test_found_modules_are_in_the_record(tmp_path, kind, names):
    """The record names the modules by their variables in the loss function."""
    train(kind, tmp_path / "run", ["hessian"])
    record = json.loads((tmp_path / "run" / "experiment_config.json").read_text())
    assert record["training"]["also"].keys() == names


def change_weight(module: nn.Module) -> None:
    with torch.no_grad():
        next(module.parameters()).mul_(2)


def change_buffer(module: nn.Module) -> None:
    module.get_buffer("1.running_mean").add_(1)


def change_mode(module: nn.Module) -> None:
    module.eval()


def freeze(module: nn.Module) -> None:
    module.requires_grad_(False)


MUTATIONS = {act.__name__: act for act in (change_weight, change_buffer, change_mode, freeze)}


def attached(tmp_path: Any, make_hook: Callable[[nn.Module], Any]) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model, other = nn.Linear(4, 4), network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    hook, also = make_hook(other), {"critic": other}
    scope = loopscope.attach(model, optimizer, hooks=[hook], also=also, out=tmp_path / "run", **QUIET)
    before = digest_of(other), other.training, next(other.parameters()).requires_grad
    with scope:
        for batch in scope.batches(torch.randn(12, 4).split(6)):
            scope.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    return other, before


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_changes_of_other_modules_are_named(tmp_path, mutation):
    """An observer that changes a declared module is caught, and the message has the name of the module."""
    with pytest.raises(StateMutationError, match=r"'spy' .*(critic|requires_grad)"):
        attached(tmp_path, lambda other: SpyHook(lambda ctx: MUTATIONS[mutation](other)))


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_changes_of_other_modules_are_undone(tmp_path, mutation):
    """An intervention that changes a declared module is rolled back."""
    other, before = attached(tmp_path, lambda other: ActingHook(lambda *contexts: MUTATIONS[mutation](other)))
    assert (digest_of(other), other.training, next(other.parameters()).requires_grad) == before


@pytest.mark.longer
def test_loop_may_change_other_modules(tmp_path):
    """The loop's own training, modes and hooks of a declared module are no mutations."""
    assert train("critic", tmp_path / "run", [SpyHook()], declared=True) == train("critic")


def test_evaluation_restores_other_modules(tmp_path):
    """Running statistics of a declared module that scope.evaluate moves are restored."""
    model, other = nn.Linear(4, 4), network()
    optimizer, data = torch.optim.SGD(model.parameters(), 0.1), torch.randn(12, 4)
    with loopscope.attach(model, optimizer, hooks=["norms"], also={"D": other}, out=tmp_path / "r", **QUIET) as scope:
        for batch in scope.batches(data.split(6)):
            scope.backward(model(batch).square().mean())
            optimizer.step()
            before = digest_of(other)
            scope.evaluate(lambda: {"score": float(other(model(data)).mean())})
            assert digest_of(other) == before


@pytest.mark.guarantee("mistakes-are-refused-early")
@pytest.mark.parametrize(
    ("also", "sentence"),
    [
        ([network()], "also is a list; it must be a dict"),
        ({"critic": 3}, "a int under 'critic'; give modules"),
        ({"": network()}, "choose a text"),
        ({"weight": network()}, "under the name 'weight'; choose a text that is no name"),
        ({3: network()}, "under the name 3; choose a text"),
    ],
)
def test_wrong_other_modules_are_refused(tmp_path, also, sentence):
    """A wrong dict, value or name is refused before the first step."""
    model = nn.Linear(4, 4)
    with pytest.raises(UsageError, match=sentence):
        loopscope.attach(model, torch.optim.SGD(model.parameters(), 0.1), hooks=["norms"], also=also, out=tmp_path)
