"""Contract tests of every hook with micro-batches, mixed precision, skipped steps and compiled models."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from loopscope import training_hooks  # noqa: F401 - fills the registry
from loopscope.errors import UnsuitableError, UsageError
from loopscope.hooks import EVERY_STEP, HookRegistry, InterventionHook, TrainingHook
from loopscope.hooks.selection import hook_kind
from loopscope.state import TrainingState
from loopscope.training import Precision, TrainingTask
from torch import nn
from torch.amp import GradScaler

from tests.contracts.test_hooks import HEALTH, fires
from tests.support import LOOPS, Case, Run, differences, mean_loss, train
from tests.support.cases import FEW_PASSES, HEADS_AS_ROUTERS, slow_unless, turn
from tests.support.models import ChunkedModel

QUIET = [hook.name for hook in HookRegistry if not (issubclass(hook, InterventionHook) and hook.commits)]
COMMITTING = [hook.name for hook in HookRegistry if hook_kind(hook) == "committing"]
STEPS = 4
pytestmark = pytest.mark.filterwarnings(f"ignore:{HEALTH}")


@dataclass(frozen=True)
class Mode:
    """A training mode: mixed precision, a head in chunks, a model compiled by a backend that keeps eager numerics."""

    amp: str = "none"
    compiled: bool = False
    chunked: bool = False

    def introduce(self, task: TrainingTask, state: TrainingState) -> None:
        precision = Precision.of(self.amp, torch.device("cpu"))
        task.compute_loss = precision.autocast(mean_loss)
        if self.amp == "fp16":
            task.scaler = state.scaler = GradScaler("cpu", init_scale=2.0**16)
        if self.chunked:
            task.model.__class__ = ChunkedModel
        if self.compiled:
            task.model.compile(backend="eager", dynamic=False)


MODES = {
    "micro-batches": Mode(),
    "bf16": Mode("bf16"),
    "fp16": Mode("fp16"),
    "compiled": Mode(compiled=True),
    "chunked": Mode("bf16", chunked=True),
}


def every_mode_and_loop(names: list[str]) -> pytest.MarkDecorator:
    """Parametrize over hooks, modes and loops; without ``slow``, over one of the hook's loops.

    Only hooks with taps are tested without ``slow`` on a head in chunks.
    """
    rows = [
        pytest.param(mode, loop, name, id=f"{mode}-{loop}-{name}", marks=slow_unless(always_on(mode, loop, name, row)))
        for name in names
        for row, mode in enumerate(MODES)
        for loop in LOOPS
    ]
    return pytest.mark.parametrize(("mode", "loop", "name"), rows)


def always_on(mode: str, loop: str, name: str, row: int) -> bool:
    """Return whether a hook is tested without ``slow`` in a mode and a loop."""
    has_taps = HookRegistry.get(name).taps is not TrainingHook.taps
    return loop == loop_for(name, row) and (has_taps or not MODES[mode].chunked)


def loop_for(name: str, row: int) -> str:
    """Choose the loop for a mode, alternating from mode to mode."""
    loops = [loop for loop in LOOPS if fires(name, loop)]
    return loops[(turn(name) + row) % len(loops)]


def run(mode: str, loop: str, hooks: list[Any]) -> Run:
    """Train the tied model in micro-batches of three, two and two rows."""
    case = Case("tied", "adamw_fused", loop)
    return train(
        case,
        hooks,
        steps=STEPS,
        accumulation_steps=3,
        introduce=MODES[mode].introduce,
        raises=(UsageError,),
        reference_weights=reference(),
        audit=True,
    )


@pytest.fixture(autouse=True)
def _without_graphs() -> Iterator[None]:
    yield
    torch.compiler.reset()


@cache
def reference() -> dict[str, torch.Tensor]:
    model: nn.Module = train(Case("tied", "adamw_fused"), steps=6, audit=False).task.model
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@cache
def bare(mode: str, loop: str) -> Run:
    return run(mode, loop, [])


def with_hook(mode: str, loop: str, name: str) -> Run:
    hook = HookRegistry.get(name)(**(FEW_PASSES | HEADS_AS_ROUTERS).get(name, {}))
    hook.step_schedule = EVERY_STEP
    return run(mode, loop, [hook])


@pytest.mark.some_rows(6)
@pytest.mark.guarantee("observers-change-nothing")
@pytest.mark.compile
@every_mode_and_loop(QUIET)
def test_run_with_a_hook_has_equal_bytes(mode: str, loop: str, name: str) -> None:
    """A hook leaves every byte of a run unchanged in every training mode, or is refused."""
    hooked = with_hook(mode, loop, name)
    if hooked.error is not None:
        assert isinstance(hooked.error, UnsuitableError)
        return
    assert len(hooked.digests) == len(bare(mode, loop).digests)
    for before, after in zip(bare(mode, loop).digests, hooked.digests, strict=True):
        assert not differences(before, after)


@pytest.mark.some_rows(2)
@pytest.mark.compile
@every_mode_and_loop(COMMITTING)
def test_a_committing_hook_leaves_the_weights_finite(mode: str, loop: str, name: str) -> None:
    trained = with_hook(mode, loop, name)
    assert trained.error is None or isinstance(trained.error, UnsuitableError)
    assert all(parameter.isfinite().all() for parameter in trained.task.model.parameters())


@pytest.mark.longer
@pytest.mark.parametrize("loop", LOOPS)
def test_float16_run_skips_some_steps(loop: str) -> None:
    """The float16 run of these tests skips at least one step, but not all of them."""
    assert 0 < bare("fp16", loop).state.loop.skipped_steps < STEPS
