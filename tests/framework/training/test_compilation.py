"""Compiled models: only training steps are compiled, hooks do not change the run, and taps receive all gradients."""

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from loopscope import training_hooks
from loopscope.errors import UsageError
from loopscope.hooks import GradientTap, HookPoint, StatePart, StepSchedule
from loopscope.state import TrainingState
from loopscope.training import TrainingTask, compile_model
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.amp import GradScaler

from tests.framework.runs.small_experiment import Small, registered, session
from tests.support import MODELS, ActingHook, Case, ReadOnlyHook, Run, SpyHook, at, differences, train

assert training_hooks.__all__
POST_BACKWARD = HookPoint.POST_BACKWARD
LOOPS = [Case("residual", loop=loop) for loop in ("epoch", "step")]


class Residual(nn.Module):
    """Residual blocks in a form that compiles to one graph."""

    def __init__(self, dropout: float = 0.2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(4, 7)

    def forward(self, inputs: Tensor) -> Tensor:
        for block in self.blocks:
            inputs = inputs + self.dropout(torch.tanh(block(inputs)))
        return self.head(inputs)


@pytest.fixture(autouse=True)
def _residual(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(MODELS, "residual", lambda: Residual(dropout=0.0))
    yield
    torch.compiler.reset()


class Graphs:
    """A compiler backend that runs graphs unchanged and counts them."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        self.count += 1
        return graph.forward

    def train(self, *args: Any, **options: Any) -> Run:
        return train(*args, introduce=lambda task, state: task.model.compile(backend=self, dynamic=False), **options)


def disturb(run_ctx: Any, model_ctx: Any) -> None:
    """Run every kind of pass, with shapes and modes that the run does not use."""
    half = tuple(part[:3] for part in run_ctx.batch_data)
    model_ctx.compute_batch_gradients(half)
    model_ctx.hessian_vector_product(dict(model_ctx.model.named_parameters()), half)
    model_ctx.take_step(half)
    model_ctx.run_training_epoch(model_ctx.get_shuffled_loader())
    run_ctx.forward(half[0], capture=["blocks.0"], train=True)


class RecordingTap(SpyHook):
    """Keeps the gradient of one block's output on every second step."""

    hook_points = frozenset({HookPoint.POST_STEP})
    step_schedule = StepSchedule(mode="stride", every_n_steps=2)

    def __init__(self) -> None:
        super().__init__()
        self.received: list[Tensor] = []

    def taps(self, model: nn.Module) -> list[GradientTap]:
        return [GradientTap("blocks.1", "output", lambda gradient: self.received.append(gradient.clone()))]


class HalvingTap(ReadOnlyHook):
    """Halves the gradient of one block's output."""

    name = "halving"
    commits = frozenset({StatePart.GRADIENTS})

    def taps(self, model: nn.Module) -> list[GradientTap]:
        return [GradientTap("blocks.1", "output", lambda gradient: gradient / 2, replaces=True)]


@pytest.mark.some_rows(2)
@pytest.mark.guarantee("every-training-mode")
@pytest.mark.compile
@pytest.mark.parametrize("case", LOOPS, ids=str)
def test_hooks_leave_compiled_run_unchanged(case: Case) -> None:
    """The training states have the same bytes, and both runs use a single graph, which is compared once with taps."""
    bare, hooked = Graphs(), Graphs()
    expected = bare.train(case)
    actual = hooked.train(case, [RecordingTap(), at(ActingHook, POST_BACKWARD, HookPoint.POST_STEP)(disturb)])
    assert [*map(differences, expected.digests, actual.digests)] == [[], [], []]
    assert (bare.count, hooked.count) == (1, 2)


@pytest.mark.compile
@pytest.mark.parametrize("case", LOOPS, ids=str)
def test_reading_tap_matches_eager_run(case: Case) -> None:
    """A tap receives the same tensors in a compiled run and in an eager run."""
    eager, compiled = RecordingTap(), RecordingTap()
    train(case, [eager], steps=4)
    Graphs().train(case, [compiled], steps=4)
    assert len(compiled.received) == len(eager.received) == (3 if case.loop == "epoch" else 2)
    for expected, actual in zip(eager.received, compiled.received, strict=True):
        torch.testing.assert_close(actual, expected)


@pytest.mark.compile
@pytest.mark.parametrize("case", LOOPS, ids=str)
def test_replacing_tap_works_in_compiled_run(case: Case) -> None:
    """A tap that replaces values gives the weights of the eager run, and warning filters are unchanged."""
    filters = [*warnings.filters]
    plain, eager = train(case), train(case, [HalvingTap(lambda run_ctx, model_ctx: None)])
    compiled = Graphs().train(case, [HalvingTap(lambda run_ctx, model_ctx: None)])
    weights = [run.task.model.blocks[0].weight for run in (plain, eager, compiled)]
    assert warnings.filters == filters
    torch.testing.assert_close(weights[2], weights[1])
    assert not torch.allclose(weights[2], weights[0])


@pytest.mark.compile
def test_run_removes_taps_from_compiled_model() -> None:
    run = Graphs().train(Case("residual"), [RecordingTap()])
    assert not any(module._forward_hooks for module in run.task.model.modules())


@pytest.mark.compile
def test_observer_captures_outputs_of_compiled_model() -> None:
    captured: list[Any] = []
    observer = at(SpyHook, HookPoint.POST_EPOCH)(
        lambda ctx: captured.append(ctx.forward(torch.ones(2, 4), capture=["blocks.2"]).captured)
    )
    Graphs().train(Case("residual"), [observer])
    assert captured[0]["blocks.2"].shape == (2, 4)


class Compiled(Small):
    """The small experiment with a compiled model."""

    name = "compiled"

    def build_model(self) -> nn.Module:
        return Residual()


@pytest.mark.guarantee("every-training-mode")
@pytest.mark.compile
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_compiled_session_matches_with_hooks(tmp_path: Path) -> None:
    """With with_compile=True, hooks leave the final weights unchanged."""
    filters = [*warnings.filters]
    with registered(Compiled):
        for folder, hooks in (("bare", []), ("hooked", ["norms", "hessian"])):
            session(tmp_path / folder, Compiled, strategies=["plain"], with_compile=True, epochs=1, hooks=hooks).run()
    bare, hooked = (torch.load(tmp_path / name / "compiled/plain/plain_final.pt") for name in ("bare", "hooked"))
    assert all(torch.equal(bare[name], hooked[name]) for name in bare)
    assert counters["stats"]["unique_graphs"] > 0
    assert warnings.filters == filters


def test_missing_compiler_is_refused_with_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The UsageError suggests installing g++."""
    from torch._inductor import cpp_builder

    def raise_no_compiler() -> str:
        raise cpp_builder.exc.InvalidCxxCompiler

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", raise_no_compiler)
    with pytest.raises(UsageError, match="needs a C\\+\\+ compiler on a CPU, but none was found; install g\\+\\+"):
        compile_model(Residual())


@pytest.mark.compile
def test_taps_see_overflow_at_run_scale() -> None:
    """A tap receives one pass at the loss scale of the run, even if its gradients overflow."""

    def introduce(task: TrainingTask, state: TrainingState) -> None:
        task.scaler = state.scaler = GradScaler("cpu", init_scale=float("inf"))
        task.model.compile(backend=Graphs(), dynamic=False)

    recording_tap = at(RecordingTap, POST_BACKWARD)()
    train(Case("residual"), [recording_tap], steps=1, introduce=introduce)
    assert [bool(gradient.isfinite().all()) for gradient in recording_tap.received] == [False, False]
