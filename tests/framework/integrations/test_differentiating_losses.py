"""Losses and evaluations that differentiate within themselves, with every hook that computes losses."""

import json
from collections.abc import Callable
from typing import Any

import loopscope
import pytest
import torch
from loopscope import training_hooks  # noqa: F401 - fills the registry
from loopscope.errors import HookError
from loopscope.hooks import HookPoint
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector
from torch.utils.data import DataLoader

from tests.support import ActingHook, at
from tests.support.cases import FEW_PASSES

pytestmark = pytest.mark.filterwarnings("ignore::loopscope.hooks.Alert", "ignore::loopscope.errors.RunNotice")
OPTIONS = {name: options for name, options in FEW_PASSES.items() if name not in ("hypothesis_test", "what_if")}
MEASURING = ("hessian", "sharpness", "lr_probe", "weight_average", "gradient_noise_scale", "variance", "batch_dynamics")
ACTING: Any = at(ActingHook, HookPoint.PRE_STEP, needs_loss=True, needs_pre_epoch_state=False)
Loss = Callable[[nn.Module, Tensor], Tensor]


def penalised(model: nn.Module, x: Tensor) -> Tensor:
    """Return a critic's loss with its gradient penalty (WGAN-GP)."""
    z = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(z).sum(), z, create_graph=True)
    return model(x).mean() + (slope.norm(dim=1) - 1).square().mean()


def functional(model: nn.Module, x: Tensor) -> Tensor:
    """Return a loss on slopes that torch.func computes."""
    slopes = torch.func.vmap(torch.func.grad(lambda row: model(row).sum()))(x)
    return model(x).square().mean() + slopes.square().mean()


def residual(model: nn.Module, x: Tensor) -> Tensor:
    """Return the residual of u'' = u, from two nested derivatives (a physics-informed network)."""
    x = x.detach().requires_grad_()
    u = model(x)
    (first,) = torch.autograd.grad(u.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x, create_graph=True)
    return (second.sum(1, keepdim=True) - u).square().mean()


def enabling(model: nn.Module, x: Tensor) -> Tensor:
    """Return the loss of :func:`penalised`, which enables gradients itself."""
    with torch.enable_grad():
        return penalised(model, x)


def hooked(model: nn.Module, x: Tensor) -> Tensor:
    """Return a loss on the gradient that a tensor hook receives."""
    z, received = x.clone().requires_grad_(), list[Tensor]()
    hidden = model(z)
    hidden.register_hook(received.append)
    (slope,) = torch.autograd.grad(hidden.square().sum(), z, create_graph=True)
    return slope.square().mean() + received[0].square().mean()


def adversarial(model: nn.Module, x: Tensor) -> Tensor:
    """Return the loss at inputs moved along the sign of the gradient."""
    z = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(z).square().mean(), z)
    return model((z + 0.1 * slope.sign()).detach()).square().mean()


LOSSES = {loss.__name__: loss for loss in (penalised, functional, residual, enabling, hooked, adversarial)}


def train(loss: Loss, *, model: nn.Module | None = None, trained: Loss | None = None, **options: Any) -> Tensor:
    """Train four steps; return the final weights."""
    torch.manual_seed(0)
    model = model or nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    loader = DataLoader(torch.randn(32, 4), batch_size=8)
    given = {"loss": loss, "loader": loader, "display": "none", "overwrite": True} | options
    with loopscope.attach(model, optimizer, **given) as scope:
        for batch in scope.batches(loader):
            scope.backward((trained or loss)(model, batch))
            optimizer.step()
            optimizer.zero_grad()
    return parameters_to_vector(model.parameters()).detach()


@pytest.mark.some_rows(2)
@pytest.mark.longer
@pytest.mark.parametrize("name", LOSSES)
def test_every_hook_takes_differentiating_losses(name: str, tmp_path: Any) -> None:
    def evaluate(model: nn.Module) -> dict[str, Any]:
        return {"val_loss": LOSSES[name](model, torch.ones(4, 4))}

    chosen = {"with_hooks": "full"} if name == "penalised" else {"hooks": MEASURING}
    options = {option: OPTIONS[option] for option in OPTIONS if "with_hooks" in chosen or option in MEASURING}
    weights = train(LOSSES[name], out=tmp_path, evaluate=evaluate, hook_options=options, **chosen)
    left_out = json.loads((tmp_path / "summary.json").read_text())["hooks_left_out"]
    assert "raised at" not in str(left_out)
    assert not {*MEASURING} & {*left_out}
    assert torch.equal(weights, train(LOSSES[name], hooks=[], out=tmp_path / "bare"))


@pytest.mark.parametrize("name", LOSSES)
def test_measured_loss_is_the_training_loss(name: str, tmp_path: Any) -> None:
    pairs = []

    def act(run_ctx: Any, model_ctx: Any) -> None:
        pairs.append((model_ctx.compute_batch_loss(), run_ctx.batch_data, copied(run_ctx.model)))

    train(LOSSES[name], hooks=[ACTING(act)], out=tmp_path)
    for loss, batch, model in pairs:
        assert not loss.requires_grad
        assert torch.equal(loss, LOSSES[name](model, batch).detach())


def copied(model: nn.Module) -> nn.Module:
    copy = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
    copy.load_state_dict(model.state_dict())
    return copy


class Forces(nn.Module):
    """An energy model whose forward pass returns forces, as derivatives of the energy."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        return -torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)[0]


def test_forces_are_captured_without_a_graph(tmp_path: Any) -> None:
    results = []
    hook = ACTING(lambda ctx, _: results.append(ctx.forward(ctx.batch_data, capture=["energy"])))
    train(lambda model, x: model(x).square().mean(), model=Forces(), hooks=[hook], out=tmp_path)
    assert results[0].output.shape == (8, 4)
    assert not results[0].output.requires_grad
    assert not results[0].captured["energy"].requires_grad


def backward_of_penalty(model: nn.Module, x: Tensor) -> Tensor:
    z = x.clone().requires_grad_()
    model(z).sum().backward(create_graph=True)
    return model(x).mean() + z.grad.square().mean()


def backward_itself(model: nn.Module, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    loss.backward(retain_graph=True)
    return loss


def detached(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean().detach()


def number(model: nn.Module, x: Tensor) -> Any:
    return model(x).square().mean().item()


CALLS = "The loss function changed the gradients of the model, as backward"
REFUSED = [
    (backward_of_penalty, CALLS),
    (backward_itself, CALLS),
    (detached, "The loss function returned a tensor without a graph, which hooks cannot differentiate"),
    (number, "The loss function returned a float, which hooks cannot differentiate"),
]


@pytest.mark.parametrize("method", ["compute_batch_gradients", "hessian_operator", "take_step"])
@pytest.mark.parametrize(("loss", "sentence"), REFUSED)
def test_undifferentiable_losses_are_refused(loss: Loss, sentence: str, method: str, tmp_path: Any) -> None:
    hook = ACTING(lambda _, model_ctx: getattr(model_ctx, method)() and None)
    with pytest.raises(HookError, match=sentence):
        train(loss, trained=lambda model, x: model(x).square().mean(), hooks=[hook], out=tmp_path)
