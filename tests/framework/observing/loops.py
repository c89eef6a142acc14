"""Training loops without a call of loopscope, and what hooks saw of them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import loopscope
import torch
from loopscope.hooks import HookPoint
from loopscope.integrations import Scope
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from tests.support import SpyHook, at

STEPS = 6
Loop = Callable[[nn.Module, Any], None]
ALL_POINTS = [HookPoint.PRE_STEP, HookPoint.POST_BACKWARD, HookPoint.PRE_UPDATE, HookPoint.POST_STEP]


def made(seed: int = 0) -> nn.Sequential:
    """Return a small classifier with dropout and batch normalisation."""
    torch.manual_seed(seed)
    layers = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3)
    return nn.Sequential(*layers)


def rows(count: int = 6) -> tuple[Tensor, Tensor]:
    """Return inputs and classes."""
    return torch.randn(count, 4), torch.randint(3, (count,))


def weights(model: nn.Module) -> Tensor:
    """Return all parameters and buffers in one vector."""
    return torch.cat([value.detach().double().flatten() for value in model.state_dict().values()])


def plain(model: nn.Module, optimizer: Any) -> None:
    """Train with a batch per step."""
    for _ in range(STEPS):
        inputs, targets = rows()
        optimizer.zero_grad()
        functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()


def accumulating(model: nn.Module, optimizer: Any) -> None:
    """Train with one to three batches per step."""
    for step in range(STEPS):
        for _ in range(1 + step % 3):
            inputs, targets = rows()
            functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()


def clipping(model: nn.Module, optimizer: Any) -> None:
    """Clip the gradients by a function that was imported by name."""
    for _ in range(STEPS):
        inputs, targets = rows()
        optimizer.zero_grad()
        functional.cross_entropy(model(inputs), targets).backward()
        clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.step()


def clipping_values(model: nn.Module, optimizer: Any) -> None:
    """Clip the elements of the gradients."""
    for _ in range(STEPS):
        inputs, targets = rows()
        optimizer.zero_grad()
        functional.cross_entropy(model(inputs), targets).backward()
        clip_grad_value_(model.parameters(), 1e-5)
        optimizer.step()


def scaled(model: nn.Module, optimizer: Any) -> None:
    """Train with a loss scale at which the first step is skipped."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**18)
    for _ in range(STEPS):
        inputs, targets = rows()
        with torch.autocast("cpu", torch.float16):
            loss = functional.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()


def two_losses(model: nn.Module, optimizer: Any) -> None:
    """Run two backward passes on one pass of the model."""
    for _ in range(STEPS):
        inputs, targets = rows()
        outputs = model(inputs)
        optimizer.zero_grad()
        functional.cross_entropy(outputs, targets).backward(retain_graph=True)
        (1e-2 * outputs.square().mean()).backward()
        optimizer.step()


def evaluating(model: nn.Module, optimizer: Any) -> None:
    """Evaluate after every second step, with and without gradients."""
    for _ in range(STEPS):
        inputs, targets = rows()
        optimizer.zero_grad()
        functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        model.eval()
        model(inputs)
        with torch.no_grad():
            model(inputs)
        model.train()


def dropping(model: nn.Module, optimizer: Any) -> None:
    """Drop every second batch after its forward pass, and some gradients before the update."""
    for step in range(STEPS):
        dropped = model(rows()[0])
        del dropped
        if step % 3 == 1:
            inputs, targets = rows()
            functional.cross_entropy(model(inputs), targets).backward()
            optimizer.zero_grad()
        inputs, targets = rows()
        functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()


def without_backward(model: nn.Module, optimizer: Any) -> None:
    """Set the gradients that ``torch.autograd.grad`` returns, which are sums over two batches in some steps."""
    weights = [*model.parameters()]
    for step in range(STEPS):
        optimizer.zero_grad()
        for _ in range(1 + step % 2):
            inputs, targets = rows()
            found = torch.autograd.grad(functional.cross_entropy(model(inputs), targets), weights)
            for weight, gradient in zip(weights, found, strict=True):
                weight.grad = gradient if weight.grad is None else weight.grad + gradient
        clip_grad_norm_(weights, 1e-3)
        optimizer.step()


def per_sample(model: nn.Module, optimizer: Any) -> None:
    """Clip the gradient of every row, as DP-SGD does; no pass of the model and no backward pass can be seen."""
    for _ in range(STEPS):
        model.eval()
        inputs, targets = rows()
        weights = {name: weight.detach() for name, weight in model.named_parameters()}

        def loss_of_one(weights: Any, row: Tensor, target: Tensor) -> Tensor:
            return functional.cross_entropy(functional_call(model, weights, (row[None],)), target[None])

        gradients = vmap(grad(loss_of_one), (None, 0, 0))(weights, inputs, targets)
        for name, weight in model.named_parameters():
            weight.grad = gradients[name].clamp(-0.1, 0.1).mean(0)
        model.train()
        optimizer.step()


LOOPS: dict[str, Loop] = {
    function.__name__: function
    for function in (
        *(plain, accumulating, clipping, clipping_values, scaled, two_losses, evaluating, dropping, without_backward),
        per_sample,
    )
}


def trained(loop: Loop, folder: Path | None = None, **options: Any) -> tuple[Tensor, Any]:
    """Train with a loop, observed if there is a folder, and return the weights and the scope."""
    model = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if folder is None:
        loop(model, optimizer)
        return weights(model), None
    given = {"hooks": [], "out": folder / "run", "display": "none"} | options
    with loopscope.attach(model, optimizer, **given) as scope:
        loop(model, optimizer)
    return weights(model), scope


def seen(loop: Loop, folder: Path, look: Callable[[Any], Any]) -> list[tuple[str, int, Any]]:
    """Return what a spy saw at every hook point, with the point and the step."""
    found: list[tuple[str, int, Any]] = []
    spy = at(SpyHook, *ALL_POINTS)(lambda ctx: found.append((ctx.hook_point.name, ctx.step, look(ctx))))
    trained(loop, folder, hooks=[spy])
    return found


def steps_of(scope: Scope) -> int:
    """Return the number of steps of a run."""
    return scope._attached.driver.loop.step
