"""Hooks in loops whose parameter groups lack options, such as a numeric learning rate."""

import json
import math
from collections.abc import Callable
from typing import Any

import loopscope
import pytest
import torch
from loopscope import training_hooks  # noqa: F401 - fills the registry
from loopscope.errors import UnsuitableError
from loopscope.integrations import Scope
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.utils.data import DataLoader
from transformers.optimization import Adafactor

from tests.support.cases import FEW_PASSES

pytestmark = pytest.mark.filterwarnings("ignore::loopscope.hooks.Alert", "ignore::loopscope.errors.RunNotice")
OPTIONS = {name: options for name, options in FEW_PASSES.items() if name not in ("hypothesis_test", "what_if")}
QUIET: dict[str, Any] = {"display": "none", "overwrite": True}


class Scaled(Optimizer):
    """Gradient descent whose options have other names, or no value."""

    def __init__(self, parameters: Any, **options: Any) -> None:
        super().__init__(parameters, options)

    def step(self, closure: Any = None) -> None:
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.sub_(parameter.grad, alpha=0.05)


def adafactor(parameters: Any) -> Optimizer:
    return Adafactor(parameters, lr=None, scale_parameter=True, relative_step=True, warmup_init=True)


def without_weight_decay(parameters: Any) -> Optimizer:
    optimizer = SGD(parameters, 0.1)
    optimizer.param_groups[0]["weight_decay"] = None
    optimizer.step = lambda closure=None: None  # type: ignore[method-assign]
    return optimizer


MISSING: dict[str, Callable[[Any], Optimizer]] = {
    "adafactor": adafactor,
    "no key": Scaled,
    "another name": lambda parameters: Scaled(parameters, learning_rate=0.05, betas=None, weight_decay=None),
    "a text": lambda parameters: Scaled(parameters, lr="auto", weight_decay="auto", betas=0.9, eps=(1e-30, 1e-3)),
    "betas of None": lambda parameters: Scaled(parameters, lr=None, betas=(None, 0.99)),
}
NUMERIC: dict[str, Callable[[Any], Optimizer]] = {
    "a tensor": lambda parameters: AdamW(parameters, lr=torch.tensor(1e-3), capturable=False, foreach=False),
    "of one element": lambda parameters: Scaled(parameters, lr=torch.tensor([0.05]), betas=(0.9, 0.95, 0.99)),
    "no weight decay": without_weight_decay,
}


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return torch.tanh(model(batch)).square().mean()


def train(make: Callable[[Any], Optimizer], **options: Any) -> tuple[Scope, nn.Module]:
    """Train four steps with the options of attach."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    optimizer = make(model.parameters())
    loader = DataLoader(torch.randn(32, 4), batch_size=8)
    given = {"loss": loss, "loader": loader, "evaluate": lambda model: {"val_loss": 1.0}} | QUIET | options
    with loopscope.attach(model, optimizer, **given) as scope:
        for batch in scope.batches(loader):
            scope.backward(loss(model, batch))
            optimizer.step()
            optimizer.zero_grad()
    return scope, model


def values(scope: Scope) -> dict[str, Any]:
    return {name: value for name, value in scope.last_metrics().items() if isinstance(value, float)}


@pytest.mark.some_rows(4)
@pytest.mark.longer
@pytest.mark.parametrize("name", [*MISSING, *NUMERIC])
def test_every_hook_takes_odd_groups(name: str, tmp_path: Any) -> None:
    make = (MISSING | NUMERIC)[name]
    scope, model = train(make, with_hooks="full", hook_options=OPTIONS, out=tmp_path)
    bare = train(make, out=tmp_path / "bare", hooks=[])[1]
    assert torch.equal(
        nn.utils.parameters_to_vector(model.parameters()), nn.utils.parameters_to_vector(bare.parameters())
    )
    assert math.isnan(scope.last_metrics().get("training_metrics/lr", math.nan)) == (name in MISSING)
    left_out = json.loads(next(tmp_path.glob("*summary.json")).read_text())["hooks_left_out"]
    assert "raised at" not in str(left_out)
    assert ("lr_probe" in left_out) == (name in MISSING)


@pytest.mark.longer
@pytest.mark.parametrize("name", MISSING)
@pytest.mark.parametrize("hook", ["hessian", "sharpness"])
def test_curvature_omits_numbers_of_rates(hook: str, name: str, tmp_path: Any) -> None:
    numbers = values(train(MISSING[name], hooks=[hook], hook_options={hook: FEW_PASSES[hook]}, out=tmp_path)[0])
    reported = {metric.partition("/")[2] for metric in numbers}
    assert reported & {"first_order_norm", "critical_sharpness"}
    assert not reported & {"sgd_norm", "gradient_curvature", "stability_ratio", "update_critical_lr"}


@pytest.mark.parametrize(("name", "value"), [("adafactor", "lr=None"), ("no key", "no lr"), ("a text", "lr='auto'")])
def test_rate_probe_is_refused_without_rates(name: str, value: str, tmp_path: Any) -> None:
    sentence = f"Hook 'lr_probe' replaces learning rates, but parameter group 0 of .* has {value}; leave the hook out"
    with pytest.raises(UnsuitableError, match=sentence):
        train(MISSING[name], hooks=["lr_probe"], hook_options={"lr_probe": FEW_PASSES["lr_probe"]}, out=tmp_path)


class Unrated(Adam):
    """Adam that hides its learning rate, as parameter-free variants do."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.param_groups[0]["lr"] = None

    def step(self, closure: Any = None) -> None:
        return None


def test_adam_without_a_rate_is_refused(tmp_path: Any) -> None:
    with pytest.raises(UnsuitableError, match=r"Hook 'adam_dynamics' reads learning rates, but .* lr=None"):
        train(Unrated, hooks=["adam_dynamics"], out=tmp_path)


def test_watched_updates_have_unknown_rates(tmp_path: Any) -> None:
    scope, _ = train(
        adafactor, hooks=["weight_updates"], hook_options={"weight_updates": {"interval": 1}}, out=tmp_path
    )
    assert scope.last_metrics()["weight_updates/update_ratio_median"] > 0
