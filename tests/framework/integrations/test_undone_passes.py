"""Models whose forward pass changes them: passes of hooks and evaluations leave them as the loop without hooks does."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import loopscope
import pytest
import torch
from loopscope.hooks import HookPoint
from torch import Tensor, nn

from tests.support import ReadOnlyHook, SpyHook, at

POINTS = HookPoint.PRE_STEP, HookPoint.POST_BACKWARD, HookPoint.POST_STEP
DATA = [torch.randn(8, 4, generator=torch.Generator().manual_seed(step)) for step in range(4)]


class Changing(nn.Module):
    """A model that calls a function before each forward pass, and computes with what the function has changed."""

    def __init__(self, change: Callable[[Any], None]) -> None:
        super().__init__()
        self.query, self.change = nn.Linear(4, 4), change
        self.key = copy.deepcopy(self.query).requires_grad_(False)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, inputs: Tensor) -> Tensor:
        with torch.no_grad():
            self.change(self)
        extra = sum(tensor.detach().float().mean() for tensor in (*self.key.parameters(), *self.state_dict().values()))
        return self.query(inputs) * extra + self.key(inputs) * self.scale


def average(model: Any) -> None:
    for key, query in zip(model.key.parameters(), model.query.parameters(), strict=True):
        key.data = key.data * 0.9 + query.data * 0.1


def average_in_place(model: Any) -> None:
    for key, query in zip(model.key.parameters(), model.query.parameters(), strict=True):
        key.mul_(0.9).add_(query, alpha=0.1)


def shrink_trained_weights(model: Any) -> None:
    model.query.weight.data.mul_(0.99)


def create_module(model: Any) -> None:
    if not hasattr(model, "norm"):
        model.norm = nn.BatchNorm1d(4, affine=False)
    model.norm(torch.ones(2, 4))


def create_parameter(model: Any) -> None:
    if not hasattr(model, "offset"):
        model.offset = nn.Parameter(torch.zeros(4))
    model.offset += 0.1


def create_buffer(model: Any) -> None:
    if not hasattr(model, "positions"):
        model.register_buffer("positions", torch.zeros(4))
    model.positions += 0.1


def replace_buffer(model: Any) -> None:
    model.scale = torch.cat([model.scale[1:], model.scale[:1] * 0.9])


def count_calls(model: Any) -> None:
    model.calls = getattr(model, "calls", 0) + 1
    model.scale.fill_(model.calls)


def register_hook(model: Any) -> None:
    model.query.register_forward_hook(lambda module, inputs, output: output * 1.1)


CHANGES = {
    change.__name__: change
    for change in (
        *(average, average_in_place, shrink_trained_weights, create_module, create_parameter, create_buffer),
        *(replace_buffer, count_calls, register_hook),
    )
}
HOOKS: dict[str, Callable[[], Any]] = {
    "first pass": lambda: "hessian",
    "forward": lambda: at(SpyHook, *POINTS)(lambda ctx: ctx.forward(ctx.batch_data) and None),
    "gradients": lambda: at(SpyHook, *POINTS)(lambda ctx: ctx.compute_batch_gradients(ctx.batch_data) and None),
    "loss": lambda: at(ReadOnlyHook, *POINTS)(lambda ctx, model_ctx: model_ctx.compute_batch_loss() and None),
    "product": lambda: at(ReadOnlyHook, *POINTS)(
        lambda ctx, model_ctx: model_ctx.hessian_vector_product({"query.bias": torch.ones(4)}) and None
    ),
}


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def train(change: Callable[[Any], None], folder: Any = None, hook: Any = None, evaluates: bool = False) -> Any:
    """Return the names and values of all tensors after every step."""
    torch.manual_seed(0)
    model = Changing(change)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    options: dict[str, Any] = {"hooks": [hook or "norms"], "loss": loss_of, "out": folder, "display": "none"}
    trace = []
    with loopscope.attach(model, optimizer, **options) if folder else nullcontext() as scope:
        for batch in scope.batches(DATA) if scope else DATA:
            loss = loss_of(model, batch)
            scope.backward(loss) if scope else loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if evaluates:
                scope.evaluate(lambda: {"value": float(model(DATA[0]).sum())})
            trace.append([(name, value.tolist()) for name, value in model.state_dict().items()])
    return trace


@pytest.mark.some_rows(3)
@pytest.mark.guarantee("attached-loops-keep-their-bytes")
@pytest.mark.parametrize("name", HOOKS)
@pytest.mark.parametrize("change", CHANGES)
def test_passes_of_hooks_are_undone(tmp_path: Any, change: str, name: str) -> None:
    """Weights, buffers and structure are those of the loop without hooks after every step."""
    assert train(CHANGES[change], tmp_path / "run", HOOKS[name]()) == train(CHANGES[change])


@pytest.mark.guarantee("attached-loops-keep-their-bytes")
@pytest.mark.parametrize("change", CHANGES)
def test_evaluations_of_changing_models_are_undone(tmp_path: Any, change: str) -> None:
    """The final state of a loop that evaluates equals that of the loop without evaluations."""
    assert train(CHANGES[change], tmp_path / "run", evaluates=True) == train(CHANGES[change])


def test_teacher_that_the_loss_updates_is_undone(tmp_path: Any) -> None:
    """The pass that finds the teacher has already changed it when it is called."""
    torch.manual_seed(0)
    student, teacher = nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)
    before = teacher.weight.tolist()

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        teacher.weight.data.lerp_(student.weight.data, 0.1)
        return (model(batch) - teacher(batch)).square().mean()

    optimizer = torch.optim.SGD(student.parameters(), 0.1)
    options: dict[str, Any] = {"hooks": ["hessian"], "loss": loss, "out": tmp_path / "run", "display": "none"}
    with loopscope.attach(student, optimizer, **options) as scope:
        next(iter(scope.batches(DATA)))
        assert teacher.weight.tolist() == before
