"""Loops that compute gradients in their own ways: by functions of torch, in closures, within backward, twice."""

import hashlib
import json
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import loopscope
import pytest
import torch
from loopscope.errors import UsageError
from loopscope.hooks import HookPoint
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.func import functional_call, grad, jacrev, vmap
from torch.nn.functional import cross_entropy
from torch.optim import LBFGS, SGD, AdamW

from tests.support import ActingHook, SpyHook

pytestmark = pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph:UserWarning")
QUIET: dict[str, Any] = {"display": "none", "overwrite": True}
DATA = [(torch.randn(8, 4, generator=torch.Generator().manual_seed(seed)), torch.arange(8) % 3) for seed in range(6)]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 3))


def loss_fn(model: nn.Module, batch: Any) -> Tensor:
    return cross_entropy(model(batch[0]), batch[1])


def digest(model: nn.Module) -> str:
    return hashlib.md5(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()


def misbehave(run_ctx: Any, model_ctx: Any) -> None:
    """Zero the weights, and draw random numbers."""
    next(run_ctx.model.parameters()).data.zero_()
    torch.randn(3)


def misbehaving() -> ActingHook:
    hook = ActingHook(misbehave)
    hook.hook_points = frozenset({HookPoint.PRE_STEP, HookPoint.POST_BACKWARD, HookPoint.POST_STEP})
    return hook


# Loops. Each trains one batch; a scope of None is the loop without hooks.


def by_autograd(model: nn.Module, optimizer: Any, batch: Any, scope: Any) -> None:
    loss = loss_fn(model, batch)
    for parameter, gradient in zip(model.parameters(), torch.autograd.grad(loss, [*model.parameters()]), strict=True):
        parameter.grad = gradient
    if scope:
        scope.gradients_ready(loss)
    optimizer.step()


def per_sample(model: nn.Module, optimizer: Any, batch: Any, scope: Any) -> None:
    """Clip the gradient of every sample, as DP-SGD does."""
    model.eval()
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def loss_of_one(weights: Any, row: Tensor, label: Tensor) -> Tensor:
        return cross_entropy(functional_call(model, weights, (row[None],)), label[None])

    gradients = vmap(grad(loss_of_one), (None, 0, 0))(weights, *batch)
    norms = sum(value.flatten(1).square().sum(1) for value in gradients.values()).sqrt()
    for name, parameter in model.named_parameters():
        factors = (1 / norms).clamp(max=1).view(-1, *[1] * parameter.ndim)
        parameter.grad = (gradients[name] * factors).mean(0)
    if scope:
        scope.gradients_ready()
    optimizer.step()


def by_jacobian(model: nn.Module, optimizer: Any, batch: Any, scope: Any) -> None:
    model.eval()
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    gradients = jacrev(lambda weights: cross_entropy(functional_call(model, weights, (batch[0],)), batch[1]))(weights)
    for name, parameter in model.named_parameters():
        parameter.grad = gradients[name]
    if scope:
        scope.gradients_ready(1.5)
    optimizer.step()


def several_backwards(model: nn.Module, optimizer: Any, batch: Any, scope: Any) -> None:
    optimizer.zero_grad()
    output = model(batch[0])
    first, second = cross_entropy(output, batch[1]), 0.1 * output.square().mean()
    first.backward(retain_graph=True)
    second.backward()
    if scope:
        scope.gradients_ready((first + second).detach())
    optimizer.step()


def with_graph(model: nn.Module, optimizer: Any, batch: Any, scope: Any) -> None:
    """Use the gradient of the gradient, as AdaHessian does."""
    loss = loss_fn(model, batch)
    if scope:
        scope.backward(loss, create_graph=True)
    else:
        loss.backward(create_graph=True)
    gradients = [parameter.grad for parameter in model.parameters()]
    curvature = torch.autograd.grad(sum(g.sum() for g in gradients), [*model.parameters()])
    for parameter, value in zip(model.parameters(), curvature, strict=True):
        parameter.grad = parameter.grad.detach() / (1 + value.abs())
    optimizer.step()
    optimizer.zero_grad()


def in_closure(model: nn.Module, optimizer: Any, batch: Any, scope: Any) -> None:
    def evaluate() -> Tensor:
        optimizer.zero_grad()
        loss = loss_fn(model, batch)
        loss.backward()
        return loss

    optimizer.step(scope.closure(evaluate) if scope else evaluate)


def in_closure_with_scope(model: nn.Module, optimizer: Any, batch: Any, scope: Any) -> None:
    def evaluate() -> Tensor:
        optimizer.zero_grad()
        loss = loss_fn(model, batch)
        scope.backward(loss) if scope else loss.backward()
        return loss

    optimizer.step(scope.closure(evaluate) if scope else evaluate)


class SharpnessAware(torch.optim.Optimizer):
    """SAM, whose optional closure is evaluated twice."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        evaluate = torch.enable_grad()(closure)
        loss = evaluate()
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        size = torch.stack([parameter.grad.norm() for parameter in parameters]).norm()
        moves = [parameter.grad * (0.05 / (size + 1e-12)) for parameter in parameters]
        for parameter, move in zip(parameters, moves, strict=True):
            parameter.add_(move)
        evaluate()
        for parameter, move in zip(parameters, moves, strict=True):
            parameter.sub_(move).sub_(parameter.grad, alpha=0.1)
        return loss


def adamw(model: nn.Module) -> Any:
    return AdamW(model.parameters(), 1e-2)


def sgd(model: nn.Module) -> Any:
    return SGD(model.parameters(), 0.1)


def searching(model: nn.Module) -> Any:
    return LBFGS(model.parameters(), 0.1, max_iter=3, line_search_fn="strong_wolfe")


def fixed(model: nn.Module) -> Any:
    return LBFGS(model.parameters(), 0.1, max_iter=3)


def aware(model: nn.Module) -> Any:
    return SharpnessAware(model.parameters())


Step = Callable[[nn.Module, Any, Any, Any], None]
READY: list[tuple[Step, Any]] = [(loop, adamw) for loop in (by_autograd, per_sample, by_jacobian, several_backwards)]
CLOSURES: list[tuple[Step, Any]] = [(in_closure, make) for make in (searching, fixed, aware, sgd)]
CLOSURES += [(in_closure_with_scope, searching), (in_closure_with_scope, aware)]
ALL = [*READY, *CLOSURES, (with_graph, sgd)]
IDS = [f"{loop.__name__}-{make.__name__}" for loop, make in ALL]


def train(loop: Step, make: Any, out: Any = None, hooks: Any = (), **options: Any) -> list[str]:
    """Return digests of the weights after every step."""
    model = network()
    optimizer, digests, context = make(model), list[str](), nullcontext()
    if hooks or options:
        given = {"hooks": hooks, "loss": loss_fn, "out": out, **QUIET, **options}
        context = loopscope.attach(model, optimizer, **given)
    with context as scope:
        for batch in scope.batches(DATA) if scope else DATA:
            loop(model, optimizer, batch, scope)
            digests.append(digest(model))
    return digests


@pytest.mark.longer
@pytest.mark.slow_rows("by_autograd-adamw")
@pytest.mark.guarantee("attached-loops-keep-their-bytes")
@pytest.mark.parametrize(("loop", "make"), ALL, ids=IDS)
def test_loops_with_own_gradients_keep_their_bits(tmp_path, loop, make):
    """Observers and a misbehaving intervention leave the weights of every step unchanged."""
    hooks = ["norms", "hessian", "consecutive", "path_length", misbehaving()]
    assert train(loop, make, tmp_path / "run", hooks) == train(loop, make)


@pytest.mark.parametrize(("loop", "make"), ALL, ids=IDS)
def test_points_fire_once_per_step(tmp_path, loop, make):
    """Every point fires once per step, with complete gradients; PRE_UPDATE does not fire with a closure."""
    hook = SpyHook(lambda ctx: {"gradients": sum(p.grad is not None for p in ctx.model.parameters())})
    points = [HookPoint.PRE_STEP, HookPoint.POST_BACKWARD, HookPoint.PRE_UPDATE, HookPoint.POST_STEP]
    hook.hook_points = frozenset(points)
    train(loop, make, tmp_path / "run", [hook])
    expected = [point.name for point in points if (loop, make) not in CLOSURES or point is not HookPoint.PRE_UPDATE]
    assert [(point, step) for point, _, step in hook.seen] == [(p, s) for s in range(1, 7) for p in expected]
    rows = [json.loads(line) for line in (tmp_path / "run" / "run.jsonl").read_text().splitlines()]
    counts = [row["spy/gradients"]["values"] for row in rows if row.get("hook_point") == "POST_BACKWARD"]
    assert [value for values in counts for value in values] == [4] * 6


@pytest.mark.parametrize(("loop", "make"), ALL, ids=IDS)
def test_loss_of_own_gradients_is_recorded(tmp_path, loop, make):
    """The recorded loss is the given one, or that of the first evaluation; without one there is none."""
    losses: list[Any] = []
    hook = SpyHook(lambda ctx: losses.append(ctx.loss))
    hook.hook_points = frozenset({HookPoint.POST_BACKWARD})
    train(loop, make, tmp_path / "run", [hook])
    assert [loss is None for loss in losses] == [loop is per_sample] * 6
    if loop is by_jacobian:
        assert [float(loss) for loss in losses] == [1.5] * 6


@pytest.mark.longer
@pytest.mark.parametrize("hook", ["gradient_overflow", "gradient_flow"])
def test_taps_are_refused_without_backward(tmp_path, hook):
    """A named hook with taps is refused before the first update; one of a group is left out with a sentence."""
    with pytest.raises(UsageError, match=f"scope.gradients_ready.* taps receive none; .*{hook}"):
        train(by_autograd, adamw, tmp_path / "run", [hook])
    train(by_autograd, adamw, tmp_path / "run", with_hooks="observers")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert "taps receive none" in summary["hooks_left_out"][hook]


@pytest.mark.parametrize("make", [searching, aware, sgd])
def test_clipping_is_refused_with_closures(tmp_path, make):
    """A hook that changes gradients sees only those of the first evaluation, so it is refused by name."""
    with pytest.raises(UsageError, match=r"'grad_clip' changes .*gradients"):
        train(in_closure, make, tmp_path / "run", ["grad_clip"])


def dropping(model: nn.Module, optimizer: Any, batch: Any, scope: Any) -> None:
    loss = loss_fn(model, batch)
    if torch.isfinite(loss):
        scope.backward(loss)
        optimizer.step()
        optimizer.zero_grad()


BAD = (torch.full((8, 4), torch.nan), DATA[0][1])


@pytest.mark.some_rows(3)
@pytest.mark.longer
@pytest.mark.parametrize("places", [[0], [1, 1], [3], [6], [2, 2, 4], [0, 0, 6, 6]])
@pytest.mark.parametrize("hook", ["hessian", "batch_rows", "norms"])
def test_dropped_batches_leave_no_trace(tmp_path, monkeypatch, hook, places):
    """Batches that the loop skips before the backward pass, anywhere, do not change what hooks record."""
    rows = []
    for number, bad in enumerate(([], places)):
        batches = [*DATA]
        for place in reversed(bad):
            batches.insert(place, BAD)
        monkeypatch.setattr("tests.framework.integrations.test_custom_gradients.DATA", batches)
        folder = tmp_path / str(number) / "run"
        torch.manual_seed(0)
        train_without_dropout(folder, hook)
        rows.append((folder / "run.jsonl").read_text())
        monkeypatch.undo()
    assert rows[0] == rows[1]


def train_without_dropout(out: Any, hook: str) -> None:
    model = network()
    model[2].p = 0.0
    optimizer = AdamW(model.parameters(), 1e-2)
    with loopscope.attach(model, optimizer, hooks=[hook], loss=loss_fn, out=out, **QUIET) as scope:
        for batch in scope.batches(DATA):
            dropping(model, optimizer, batch, scope)


def optimizers_in_backward(model: nn.Module) -> list[Any]:
    """Return an optimizer for each parameter, which steps as soon as its gradient is complete."""
    optimizers = {parameter: AdamW([parameter], 1e-2) for parameter in model.parameters()}

    def update(parameter: nn.Parameter) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    return [*optimizers.values()]


@pytest.mark.longer
@pytest.mark.filterwarnings("always::loopscope.errors.RunNotice")
@pytest.mark.parametrize("hooks", [["norms"], ["hessian"], ["batch_rows", "consecutive"], [misbehaving()]])
def test_optimizers_in_backward_are_reported(tmp_path, capsys, hooks):
    """Hooks run, their passes step no optimizer, and a notice says what is missing."""
    digests = []
    for is_attached in (False, True):
        model = network()
        given = {"hooks": hooks, "loss": loss_fn, "out": tmp_path / "run", "display": "normal"}
        optimizers = optimizers_in_backward(model)
        context = loopscope.attach(model, optimizers, **given) if is_attached else nullcontext()
        with context as scope:
            for batch in scope.batches(DATA) if scope else DATA:
                loss = loss_fn(model, batch)
                scope.backward(loss) if scope else loss.backward()
                digests.append(digest(model))
    assert digests[:6] == digests[6:]
    assert "AdamW steps within the backward pass" in " ".join(capsys.readouterr().out.split())


MISTAKES: dict[str, tuple[Callable[[Any, Any, Any], object], str]] = {
    "twice": (
        lambda scope, model, loss: [scope.gradients_ready(), scope.gradients_ready()],
        "before its optimizer.step",
    ),
    "after backward": (
        lambda scope, model, loss: [scope.backward(loss), scope.gradients_ready()],
        "after the gradients",
    ),
    "a vector": (lambda scope, model, loss: scope.gradients_ready(torch.ones(2)), "of shape \\(2,\\); give the loss"),
    "a text": (lambda scope, model, loss: scope.gradients_ready("1"), "given a str; give the loss"),
    "no function": (lambda scope, model, loss: scope.closure(loss), "was given a Tensor; give the closure"),
}


@pytest.mark.guarantee("mistakes-are-refused-early")
@pytest.mark.parametrize("mistake", MISTAKES)
def test_wrong_calls_are_refused(tmp_path, mistake):
    """A call out of order, or with a wrong argument, raises one sentence."""
    model = network()
    act, sentence = MISTAKES[mistake]
    scope = loopscope.attach(model, sgd(model), hooks=["norms"], out=tmp_path / "run", **QUIET)
    batch = next(iter(scope.batches(DATA)))
    with pytest.raises(UsageError, match=sentence), scope:
        act(scope, model, loss_fn(model, batch))


def test_calls_without_batch_are_refused(tmp_path):
    """The call needs a batch in a loop that uses scope.batches."""
    model = network()
    with loopscope.attach(model, sgd(model), hooks=["norms"], out=tmp_path / "run", **QUIET) as scope:
        for batch in scope.batches(DATA[:1]):
            scope.backward(loss_fn(model, batch))
            scope._loop._optimizers[0].step()
        with pytest.raises(UsageError, match=r"gradients_ready\(\) was called without a batch"):
            scope.gradients_ready()


def test_micro_batches_and_scaler_of_ready_gradients(tmp_path):
    """With accumulate= and a GradScaler, gradients_ready shows hooks unscaled gradients, once per step."""
    norms: list[float] = []

    def run(scope: Any, model: nn.Module, optimizer: Any, scaler: Any) -> str:
        for index, batch in enumerate(scope.batches(DATA) if scope else DATA):
            loss = loss_fn(model, batch) / 2
            (scaler.scale(loss)).backward()
            if index % 2:
                norms.append(float(torch.stack([p.grad.norm() for p in model.parameters()]).norm()) / 4)
                if scope:
                    scope.gradients_ready(loss)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
        return digest(model)

    bare = network()
    expected = run(None, bare, sgd(bare), GradScaler("cpu", init_scale=4.0))
    model, scaler = network(), GradScaler("cpu", init_scale=4.0)
    optimizer, seen = sgd(model), list[float]()
    hook = SpyHook(lambda ctx: seen.append(float(torch.stack([p.grad.norm() for p in ctx.model.parameters()]).norm())))
    hook.hook_points = frozenset({HookPoint.POST_BACKWARD})
    given = {"hooks": [hook], "scaler": scaler, "accumulate": 2, "out": tmp_path / "run", **QUIET}
    with loopscope.attach(model, optimizer, **given) as scope:
        assert run(scope, model, optimizer, scaler) == expected
    assert seen == pytest.approx(norms[3:])


def test_backward_passes_inputs_to_torch(tmp_path):
    """With inputs=, only these parameters get gradients."""
    model = network()
    with loopscope.attach(model, sgd(model), hooks=["norms"], out=tmp_path / "run", **QUIET) as scope:
        for batch in scope.batches(DATA[:1]):
            scope.backward(loss_fn(model, batch), inputs=[model[0].weight])
            assert [parameter.grad is None for parameter in model.parameters()] == [False, True, True, True]
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                scope._loop._optimizers[0].step()
