"""The producer of a planted NaN is named: in every module, forward and backward, in the optimizer and in the data."""

import json
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import loopscope
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.support.tiny_transformers import build

pytestmark = pytest.mark.longer

STEP = 3
MASKS: list[Tensor] = []
"""Dropout masks of passes; global, since measurements restore the objects that a module refers to."""


class Block(nn.Module):
    """A residual block with a normalisation, whose input has several uses."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down, self.drop = nn.LayerNorm(8), nn.Linear(8, 12), nn.Linear(12, 8), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(torch.relu(self.up(self.norm(x)))))


class Net(nn.Module):
    """An input layer, three blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(4, 8), nn.Linear(8, 3)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


class NanGradient(torch.autograd.Function):
    """The identity, with NaN as its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * math.nan


def batches(count: int = STEP + 1) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(6, 4, generator=generator), torch.arange(6) % 3) for _ in range(count)]


def alerts(
    folder: Path,
    model: nn.Module,
    plant: Callable[[int], object],
    data: Any = None,
    loss: Any = loss_of,
    **options: Any,
) -> list[dict[str, Any]]:
    """Train with the hook, and return its alerts; ``plant`` is called before every step with its number."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    choices = {"out": folder / "run", "display": "none", "loss": loss, "loop": "step", "log_every": 100}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with loopscope.attach(model, optimizer, hooks=["first_nonfinite"], **choices) as scope:
            for step, batch in enumerate(scope.batches(data or batches()), start=1):
                plant(step)
                scope.backward(loss_of(model, batch) if loss is None else loss(model, batch))
                optimizer.step()
                optimizer.zero_grad()
    return [json.loads(line) for line in (folder / "run" / "alerts.jsonl").read_text().splitlines()]


MODULES = [name for name, module in Net().named_modules() if not isinstance(module, nn.ModuleList)]


@pytest.mark.some_rows(3)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("module", MODULES)
def test_forward_producer_is_named(tmp_path, module, bad):
    """One element of row 4 of the module's output is not finite."""
    torch.manual_seed(0)
    model = Net()
    target = model.get_submodule(module)
    forward = target.forward

    def broken(x: Tensor) -> Tensor:
        output = forward(x)
        mask = torch.zeros_like(output)
        mask[4, 1] = bad
        return output + mask

    def plant(step: int) -> None:
        target.forward = broken if step == STEP else forward

    (alert,) = alerts(tmp_path, model, plant)
    name = f"{module} ({type(target).__name__})" if module else "the model's own code (Net)"
    assert alert["step"] == STEP
    assert (
        alert["sentence"]
        == f"The first non-finite value of step 3 is in the output of {name}, from finite inputs, row 4."
    )


@pytest.mark.some_rows(2)
@pytest.mark.parametrize("module", [name for name in MODULES if name not in ("", "stem")])
def test_backward_producer_is_named(tmp_path, module):
    """The loss is finite; the backward pass through the module makes NaN of a finite gradient.

    Of the model and its first layer, only the gradient of the data would be NaN, which nothing uses.
    """
    torch.manual_seed(0)
    model = Net()
    target = model.get_submodule(module)
    forward = target.forward

    def plant(step: int) -> None:
        target.forward = (lambda x: forward(NanGradient.apply(x.clone()))) if step == STEP else forward

    (alert,) = alerts(tmp_path, model, plant)
    assert alert["step"] == STEP
    name = f"{module} ({type(target).__name__})"
    assert f"backward pass through {name} computes from finite gradients" in alert["sentence"]


def test_code_of_a_block_is_the_blocks(tmp_path):
    """A square root at 0 between the layers of a block has an infinite derivative."""
    torch.manual_seed(0)
    model = Net()
    block = model.blocks[1]

    def broken(x: Tensor) -> Tensor:
        return x + block.down(torch.relu(block.up(block.norm(x))) * (x.square().sum(-1, keepdim=True) * 0).sqrt())

    def plant(step: int) -> None:
        block.forward = broken if step == STEP else type(block).forward.__get__(block)

    (alert,) = alerts(tmp_path, model, plant)
    assert "backward pass through blocks.1 (Block) computes" in alert["sentence"]


@pytest.mark.parametrize("name", ["blocks.2.up.weight", "stem.bias", "head.weight"])
@pytest.mark.parametrize("last", [False, True])
def test_parameters_written_by_the_optimizer_are_named(tmp_path, name, last):
    """The value is found in the next step, or at the end of the training."""
    torch.manual_seed(0)
    model = Net()
    optimizer_step = torch.optim.SGD.step

    def broken(self: Any, *arguments: Any) -> None:
        optimizer_step(self, *arguments)
        with torch.no_grad():
            model.get_parameter(name).view(-1)[1] = math.nan

    def plant(step: int) -> None:
        torch.optim.SGD.step = broken if step == STEP else optimizer_step

    try:
        (alert,) = alerts(tmp_path, model, plant, batches(STEP if last else STEP + 1))
    finally:
        torch.optim.SGD.step = optimizer_step
    assert alert["step"] == STEP
    assert f"In step 3 the optimizer wrote non-finite values into 1 of 22 parameters: {name}." in alert["sentence"]


@pytest.mark.parametrize("row", [0, 5])
def test_rows_of_bad_data_are_named(tmp_path, row):
    data = batches()
    data[STEP - 1][0][row, 2] = math.nan
    (alert,) = alerts(tmp_path, Net(), lambda step: None, data)
    assert alert["sentence"] == f"The batch of step 3 is not finite: [0], row {row}."


def test_loss_of_finite_outputs_is_named(tmp_path):
    """The loss function divides by zero, after finite outputs."""
    steps = []

    def loss(model: nn.Module, batch: Any) -> Tensor:
        value = loss_of(model, batch)
        return value / 0 if steps == [STEP] else value

    (alert,) = alerts(tmp_path, Net(), lambda step: steps.__setitem__(slice(None), [step]), loss=loss)
    assert alert["sentence"] == "The loss of step 3 is inf, computed from finite outputs of all modules."


def test_nearest_parameter_is_named_without_loss(tmp_path):
    """The pass cannot be repeated, and the sentence gives the reason."""
    torch.manual_seed(0)
    model = Net()
    block = model.blocks[1]
    forward = block.forward

    def plant(step: int) -> None:
        block.forward = (lambda x: forward(NanGradient.apply(x))) if step == STEP else forward

    (alert,) = alerts(tmp_path, model, plant, loss=None)
    assert "nearest to the loss is blocks.0.down.bias" in alert["sentence"]
    assert "the loop gives no loss= to repeat it" in alert["sentence"]


@pytest.mark.parametrize("name", ["llama", "mixtral", "vit"])
def test_modules_of_transformers_are_named(tmp_path, name):
    """The model has masks with −inf, tied weights or routers, and computes the loss itself."""
    model, batch, loss = build(name)
    layers = {"vit": "vit.layers.1"}.get(name, "model.layers.1")
    target = model.get_submodule(layers)
    mlp = target.mlp
    forward = mlp.forward

    def plant(step: int) -> None:
        mlp.forward = (lambda *args, **kwargs: forward(*args, **kwargs) * math.inf) if step == STEP else forward

    (alert,) = alerts(tmp_path, model, plant, [batch] * 4, loss)
    assert f"is in the output of {layers}.mlp (" in alert["sentence"]


def test_dropout_mask_of_the_step_is_repeated(tmp_path):
    """A value that depends on the random mask appears in the repeated pass, too."""
    torch.manual_seed(0)
    model = Net()
    drop = model.blocks[2].drop
    forward = drop.forward
    MASKS.clear()

    def spying(x: Tensor) -> Tensor:
        output = forward(x)
        MASKS.append(output == 0)
        return output / output.abs().amin().sign()  # 0 / 0 if any element was dropped

    (alert, *_) = alerts(tmp_path, model, lambda step: setattr(drop, "forward", spying if step == STEP else forward))
    assert "blocks.2.drop (Dropout)" in alert["sentence"]
    assert torch.equal(MASKS[0], MASKS[1])


def test_healthy_training_has_no_alert(tmp_path):
    assert alerts(tmp_path, Net(), lambda step: None, batches(20)) == []
