"""Several optimizers that each train a part of one model, with one record."""

import copy
import json
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import loopscope
import pytest
import torch
from loopscope.errors import UnsuitableError, UsageError
from loopscope.hooks import HookPoint
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import SGD, Adam, AdamW, Muon, Optimizer

from tests.support import ActingHook, SpyHook

QUIET: dict[str, Any] = {"display": "none", "overwrite": True}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 3))


def muon_and_adamw(model: nn.Module) -> list[Optimizer]:
    matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2]
    return [Muon(matrices, lr=0.02), AdamW([p for p in model.parameters() if p.ndim < 2], lr=1e-2)]


def two_adams(model: nn.Module) -> list[Optimizer]:
    return [AdamW(model[0].parameters(), lr=1e-2), AdamW([*model[1].parameters(), *model[4].parameters()], lr=1e-3)]


def three(model: nn.Module) -> list[Optimizer]:
    return [SGD(model[0].parameters(), 0.1), Adam(model[1].parameters()), AdamW(model[4].parameters(), fused=True)]


SETS = {make.__name__: make for make in (muon_and_adamw, two_adams, three)}


def every_step(optimizers: list[Optimizer], step: int) -> list[Optimizer]:
    return optimizers


def reversed_order(optimizers: list[Optimizer], step: int) -> list[Optimizer]:
    return optimizers[::-1]


def second_every_other_step(optimizers: list[Optimizer], step: int) -> list[Optimizer]:
    return optimizers[:1] if step % 2 else optimizers


ORDERS = {order.__name__: order for order in (every_step, reversed_order, second_every_other_step)}


class Training:
    """A loop with several optimizers, with and without hooks; the bits of the model after every step."""

    def __init__(self, optimizers: str = "muon_and_adamw", order: str = "every_step", scaler: Any = None) -> None:
        self.model = network()
        self.optimizers = SETS[optimizers](self.model)
        self.schedulers = [torch.optim.lr_scheduler.StepLR(item, 2, 0.5) for item in self.optimizers]
        self.order, self.scaler = ORDERS[order], scaler
        self.bits: list[list[Tensor]] = []

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    def run(self, out: Any = None, hooks: Any = (), **options: Any) -> "Training":
        given = {"scheduler": self.schedulers, "loss": self.loss, "hooks": hooks, "scaler": self.scaler, "out": out}
        context: Any = nullcontext()
        if hooks:
            context = loopscope.attach(self.model, self.optimizers, **given, **QUIET, **options)
        torch.manual_seed(1)
        data = [(torch.randn(8, 8), torch.randint(3, (8,))) for _ in range(6)]
        with context as scope:
            for step, batch in enumerate(scope.batches(data) if scope else data):
                loss = self.loss(self.model, batch)
                if scope:
                    scope.backward(loss)
                else:
                    (self.scaler.scale(loss) if self.scaler else loss).backward()
                for optimizer in self.order(self.optimizers, step):
                    self.scaler.step(optimizer) if self.scaler else optimizer.step()
                if self.scaler:
                    self.scaler.update()
                for scheduler in self.schedulers:
                    scheduler.step()
                self.model.zero_grad()
                self.bits.append([parameter.detach().clone() for parameter in self.model.parameters()])
        return self

    def equals(self, other: "Training") -> bool:
        pairs = zip(self.bits, other.bits, strict=True)
        return all(torch.equal(a, b) for mine, theirs in pairs for a, b in zip(mine, theirs, strict=True))


def misbehave(run_ctx: Any, model_ctx: Any) -> None:
    """Change weights, moments and learning rates, in an intervention that takes steps."""
    if run_ctx.hook_point in (HookPoint.PRE_STEP, HookPoint.POST_STEP):
        model_ctx.take_step(run_ctx.batch_data)
        next(run_ctx.model.parameters()).data.zero_()
        torch.randn(3)


@pytest.mark.some_rows(3)
@pytest.mark.longer
@pytest.mark.guarantee("attached-loops-keep-their-bytes")
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("optimizers", SETS)
def test_several_optimizers_keep_their_bits(tmp_path, optimizers, order):
    """A run with observers and a misbehaving intervention has the bits of the bare loop after every step."""
    hooks = ["hessian", "norms", "weight_updates", "batch_rows", ActingHook(misbehave)]
    watched = Training(optimizers, order).run(tmp_path / "run", hooks)
    assert watched.equals(Training(optimizers, order).run())


@pytest.mark.longer
@pytest.mark.parametrize("first_scale", [4.0, 2.0**120])
def test_scaler_of_several_optimizers(tmp_path, first_scale):
    """With a GradScaler, also one whose first steps overflow, the bits are those of the bare loop."""
    scalers = [GradScaler("cpu", init_scale=first_scale, backoff_factor=2.0**-60) for _ in range(2)]
    watched = Training("two_adams", scaler=scalers[0]).run(tmp_path / "run", ["norms", ActingHook(misbehave)])
    assert watched.equals(Training("two_adams", scaler=scalers[1]).run())


@pytest.mark.parametrize("order", ["every_step", "reversed_order"])
def test_post_step_follows_the_last_optimizer(tmp_path, order):
    """PRE_UPDATE sees the weights before any update, POST_STEP those after all updates, each once per step."""
    seen: list[tuple[str, int, list[Tensor]]] = []

    def copy_weights(ctx: Any) -> None:
        seen.append((ctx.hook_point.name, ctx.step, [item.detach().clone() for item in ctx.model.parameters()]))

    hook = SpyHook(copy_weights)
    hook.hook_points = frozenset({HookPoint.PRE_UPDATE, HookPoint.POST_STEP})
    start = [parameter.detach().clone() for parameter in network().parameters()]
    training = Training("three", order).run(tmp_path / "run", [hook])
    points = [(point, step) for point, step, _ in seen]
    assert points == [(point, step) for step in range(1, 7) for point in ("PRE_UPDATE", "POST_STEP")]
    expected = [weights for pair in zip([start, *training.bits], training.bits, strict=False) for weights in pair]
    assert all(
        torch.equal(a, b)
        for (*_, mine), theirs in zip(seen, expected, strict=True)
        for a, b in zip(mine, theirs, strict=True)
    )


def test_groups_name_their_optimizers(tmp_path):
    """Views of the parameter groups have the position and the class of their optimizer, and the names in it."""
    seen: list[Any] = []
    hook = SpyHook(lambda ctx: seen.extend(ctx.optimizer_groups))
    hook.hook_points = frozenset({HookPoint.POST_BACKWARD})
    Training().run(tmp_path / "run", [hook])
    views = [(group.optimizer, group.optimizer_class.__name__, group.names, group.lr) for group in seen[:2]]
    rest = ("0.bias", "1.weight", "1.bias", "4.bias")
    assert views == [(0, "Muon", ("0.weight", "4.weight"), 0.02), (1, "AdamW", rest, 0.01)]


def test_record_names_all_optimizers(tmp_path):
    """The record has the classes of all optimizers and schedulers."""
    Training("three").run(tmp_path / "run", ["norms"])
    training = json.loads((tmp_path / "run" / "experiment_config.json").read_text())["training"]
    names = "SGD and Adam and AdamW", "StepLR and StepLR and StepLR"
    assert (training["optimizer"], training["scheduler"]) == names


@pytest.mark.longer
def test_adam_dynamics_measures_the_adam_part(tmp_path):
    """With Muon and AdamW, adam_dynamics reports the parameters of AdamW; without any Adam it is refused by name."""
    options = {"hook_options": {"adam_dynamics": {"every_n_steps": 1}}}
    Training().run(tmp_path / "run", ["adam_dynamics"], **options)
    names = loopscope.read_run(tmp_path / "run").names
    assert "adam_dynamics/update_norm" in names
    model = network()
    optimizers = [SGD(model[0].parameters(), 0.1), SGD(model[4].parameters(), 0.1), SGD(model[1].parameters(), 0.1)]
    scope = loopscope.attach(model, optimizers, hooks=["adam_dynamics"], out=tmp_path / "sgd", **QUIET)
    with pytest.raises(UnsuitableError, match="the optimizer of this run is SGD"):
        next(iter(scope.batches([torch.randn(2, 8)])))


@pytest.mark.filterwarnings("always::loopscope.errors.RunNotice")
def test_omitted_parameters_are_reported(tmp_path, capsys):
    """An optimizer of a part of the model is reported once, with names of the other parameters."""
    model = network()
    first = muon_and_adamw(model)[0]
    with loopscope.attach(model, first, hooks=["norms"], out=tmp_path, display="normal") as scope:
        for batch in scope.batches([torch.randn(2, 8)]):
            scope.backward(model(batch).square().mean())
            first.step()
        printed = capsys.readouterr()
    text = " ".join((printed.out + printed.err).split())
    assert text.count("0.bias") == 1
    assert "warning: parameters-without-optimizer, step 0: 4 of 6 trainable parameters are in no optimizer" in text
    assert "give attach all optimizers in a list" in text


def test_frozen_parameters_are_not_reported(tmp_path):
    """Parameters that need no gradient may be missing from the optimizer."""
    model = network()
    model[0].requires_grad_(False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rest = [parameter for parameter in model.parameters() if parameter.requires_grad]
        loopscope.attach(model, SGD(rest, 0.1), hooks=["norms"], out=tmp_path, **QUIET).close()


MISTAKES: dict[str, tuple[Callable[[nn.Module], Any], str]] = {
    "empty": (lambda model: [], "The list of optimizers is empty"),
    "a model": (lambda model: [model], "The optimizer is a Sequential; .*or a list of several"),
    "shared": (lambda model: [SGD(model.parameters(), 0.1), Adam(model.parameters())], "SGD and Adam train the same"),
    "twice": (lambda model: [SGD(model.parameters(), 0.1)] * 2, "SGD and SGD train the same parameter"),
    "a closure": (lambda model: [SGD(model[0].parameters(), 0.1), torch.optim.LBFGS(model[4].parameters())], "closure"),
}


@pytest.mark.guarantee("mistakes-are-refused-early")
@pytest.mark.parametrize("mistake", MISTAKES)
def test_wrong_optimizers_are_refused(tmp_path, mistake):
    """A list that cannot work is refused in one sentence."""
    model = network()
    make, sentence = MISTAKES[mistake]
    with pytest.raises(UsageError, match=sentence):
        loopscope.attach(model, make(model), hooks=["norms"], out=tmp_path, **QUIET)


class Decaying(SGD):
    """An optimizer that changes the weights after the step of its base class."""

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        if any(parameter.isnan().any() for parameter in self.param_groups[0]["params"]):
            raise ArithmeticError
        torch._foreach_mul_([parameter.data for parameter in self.param_groups[0]["params"]], 0.9)
        return result


@pytest.mark.parametrize("fails", [False, True])
def test_nested_steps_of_subclasses_are_one(tmp_path, fails):
    """An optimizer of the base class gives super().step() hooks; the outermost step counts, also after one raised."""
    SGD([nn.Parameter(torch.ones(1))], 0.1)
    model = nn.Linear(4, 3)
    optimizer = Decaying(model.parameters(), 0.1)
    weights: list[Any] = []
    hook = SpyHook(lambda ctx: weights.append(ctx.model.weight.detach().clone()))
    hook.hook_points = frozenset({HookPoint.PRE_UPDATE, HookPoint.POST_STEP})
    with loopscope.attach(model, optimizer, hooks=[hook], out=tmp_path / "run", **QUIET):
        for number in range(3):
            model(torch.randn(8, 4)).square().mean().backward()
            if fails and number == 0:
                start = model.weight.detach().clone()
                model.weight.grad.fill_(torch.nan)
                with pytest.raises(ArithmeticError):
                    optimizer.step()
                model.weight.data.copy_(start)
                weights.clear()
            else:
                optimizer.step()
                assert torch.equal(weights[-1], model.weight)
            optimizer.zero_grad()
    assert len(weights) == (4 if fails else 6)


def test_closed_scope_releases_all_optimizers(tmp_path):
    """After the end of a run all of its optimizers can be attached again."""
    model = network()
    optimizers = muon_and_adamw(model)
    loopscope.attach(model, optimizers, hooks=["norms"], out=tmp_path, **QUIET).close()
    loopscope.attach(copy.copy(model), optimizers, hooks=["norms"], out=tmp_path, **QUIET).close()


def test_combined_state_is_resumed(tmp_path):
    """The state of a scope with several optimizers resumes hooks in a second scope."""
    training = Training()
    scope = loopscope.attach(training.model, training.optimizers, hooks=["path_length"], out=tmp_path / "r", **QUIET)
    data = [torch.randn(4, 8) for _ in range(4)]
    for batch in scope.batches(data):
        scope.backward(training.model(batch).square().mean())
        for optimizer in training.optimizers:
            optimizer.step()
    state = scope.state_dict()
    scope.close()
    again = loopscope.attach(training.model, training.optimizers, hooks=["path_length"], out=tmp_path / "r", **QUIET)
    again.load_state_dict(state)
    for batch in again.batches(data):
        again.backward(training.model(batch).square().mean())
        for optimizer in training.optimizers:
            optimizer.step()
    again.close()
    assert again.last_metrics()["path_length/steps"] == 8
