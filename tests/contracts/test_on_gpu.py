"""Contract tests of hooks on a GPU: identical bytes, one wait per visit. No machine of the project has a GPU."""

from collections.abc import Callable

import pytest
import torch
from loopscope.engine import HookManager
from loopscope.experiments.mod_arithmetic import ModArithmeticRunner
from loopscope.experiments.mod_arithmetic.runner import QUICK, ModArithmeticConfig
from loopscope.hooks import HookPoint, TrainingHook
from loopscope.loops import epoch_loop
from loopscope.runs import build_run
from loopscope.state import TrainingState, without_on_demand
from loopscope.state.settings import deterministic
from loopscope.training import TrainingTask

from tests.contracts.test_hooks import HEALTH, QUIET, make
from tests.contracts.test_transfers import OBSERVERS
from tests.support import SpyHook, WatchedManager
from tests.support.waits import count_waits

pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{HEALTH}"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype"),
    pytest.mark.longer,
]
TINY = QUICK | {"train_size": 96, "test_size": 32, "embed_dim": 16, "ff_dim": 32, "epochs": 2}
ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def on_both(always: list[str], all_: list[str]) -> pytest.MarkDecorator:
    """Parametrize over some names on the CPU, which tests the tests themselves, and over all names on the GPU."""
    rows = [pytest.param(name, "cpu", id=f"{name}-cpu") for name in always]
    return pytest.mark.parametrize(
        ("name", "device"), [*rows, *(pytest.param(name, "cuda", id=f"{name}-cuda", marks=ON_GPU) for name in all_)]
    )


def build(device: str) -> tuple[TrainingTask, TrainingState]:
    task, state = build_run(ModArithmeticRunner(ModArithmeticConfig(**TINY), torch.device(device)), "stride")
    task.length = TINY["epochs"]
    return task, state


def reference(task: TrainingTask) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in task.model.named_parameters()}


def digest(device: str, hooks: list[TrainingHook]) -> dict[str, int]:
    """Train with deterministic algorithms and return the digests of the training state."""
    with deterministic(on=True):
        task, state = build(device)
        manager = HookManager(hooks, task, state, required=set(), reference_weights=reference(task))
        epoch_loop(task, manager)
        manager.end("completed")
    return without_on_demand(state.digest())


@on_both(["norms", "hessian"], QUIET)
def test_run_with_hook_matches_bare_run(name, device):
    """Both digests are equal on the CPU and on the GPU."""
    assert digest(device, [make(name)]) == digest(device, [])


class CountingManager(WatchedManager):
    """A manager that counts how often the host waits in each visit."""

    def __init__(self, hooks: list[TrainingHook], task: TrainingTask, state: TrainingState) -> None:
        super().__init__(hooks, task, state, required=set(), reference_weights=reference(task))
        self.device = next(task.model.parameters()).device
        self.waits: list[int] = []

    def watch_call(self, point: HookPoint, call: Callable[[], None]) -> None:
        with count_waits(self.device) as waits:
            call()
        self.waits.append(waits.count)


def waits(hook: TrainingHook, device: str) -> list[int]:
    """Train with a hook and return how often the host waits in each visit."""
    task, state = build(device)
    manager = CountingManager([hook], task, state)
    epoch_loop(task, manager)
    manager.end("completed")
    return manager.waits


@on_both(["norms", "weight_tracking", "gradient_flow"], OBSERVERS)
def test_observer_dispatch_waits_for_device_at_most_once(name, device):
    """The weight average runs without its evaluation, which is user code and may wait freely."""
    hook = make(name)
    if name == "weight_average":
        hook.evaluate = False  # user code may wait any number of times
    assert max(waits(hook, device)) <= 1


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_GPU)])
def test_hook_reading_two_numbers_waits_twice(device):
    """The wait counter detects two separate reads in one call."""

    def reads(ctx):
        first, second, *_ = ctx.model.parameters()
        return {"value": float(first.sum()) + float(second.sum())}

    assert max(waits(SpyHook(reads), device)) == 2
