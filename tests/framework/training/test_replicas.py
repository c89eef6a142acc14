"""Hooks under DistributedDataParallel: three ranks end with the weights of the run without hooks."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed
from loopscope import training_hooks
from loopscope.data import TensorLoader, fixed_order
from loopscope.engine import HookManager
from loopscope.errors import HookError
from loopscope.hooks import HookPoint, HookRegistry
from loopscope.loops import epoch_loop
from loopscope.state import RandomStreams, TrainingState
from loopscope.state.digest import digest
from loopscope.training import TrainingTask
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.support import ActingHook, at, mean_loss, run_info
from tests.support.ranks import on_ranks

pytestmark = pytest.mark.ranks

assert training_hooks.__all__
RANKS, ROWS, BATCH = 3, 48, 12
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bucket views": {"gradient_as_bucket_view": True},
    "unused parameters": {"find_unused_parameters": True},
    "static graph": {"static_graph": True},
    "small buckets": {"bucket_cap_mb": 1e-4},
}
MEASURING = ("hessian", "sharpness", "lr_probe", "adam_dynamics", "norms", "path_length", "weight_average")


class Model(nn.Sequential):
    """A model, optionally with an unused parameter."""

    def __init__(self, *, unused: bool) -> None:
        middle = nn.Dropout(0.2), nn.BatchNorm1d(16)
        super().__init__(nn.Linear(5, 16), *middle, nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, 16), nn.Linear(16, 3))
        self.register_parameter("unused", nn.Parameter(torch.ones(3)) if unused else None)


def build(kind: str, *, accumulate: int) -> tuple[TrainingTask, TrainingState]:
    """Build a run whose ranks share the rows of each batch."""
    torch.manual_seed(0)
    model: nn.Module = Model(unused=kind == "unused parameters").double()
    indices = torch.arange(ROWS).view(-1, BATCH // RANKS)[torch.distributed.get_rank() :: RANKS].flatten()
    data = (torch.randn(ROWS, 5, dtype=torch.float64)[indices], torch.randint(3, (ROWS,))[indices])
    model = DistributedDataParallel(model, **KINDS[kind])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = TensorLoader(data, BATCH // RANKS, fixed_order(torch.arange(len(data[0]))))
    task = TrainingTask(model, optimizer, loader, mean_loss, length=2, snapshot_every=1, accumulation_steps=accumulate)
    return task, TrainingState(model, optimizer, RandomStreams(7))


def trained(
    task: TrainingTask, state: TrainingState, hooks: Sequence[Any], *, audit: bool = False
) -> dict[str, int | None]:
    manager = HookManager(hooks, task, state, audit=audit)
    manager.start(run_info(task, manager, "epoch"))
    epoch_loop(task, manager)
    return {name: digest(value) for name, value in task.model.state_dict().items()}


def misbehaving_hook(run: Any, model: Any) -> dict[str, float]:
    torch.rand(3)
    model.compute_batch_gradients(next(iter(model.loader.batches(0))))
    model.take_step(next(iter(model.loader.batches(0))))
    with torch.no_grad():
        next(model.model.parameters()).zero_()
    return {}


def preserves_weights(kind: str, accumulate: int, names: Sequence[str] = MEASURING) -> list[bool]:
    """Return, for two sets of hooks, whether the run with them has the weights of the run without."""
    make = partial(build, kind, accumulate=accumulate)
    bare = trained(*make(), [])
    points = set(HookPoint) - {HookPoint.PRE_UPDATE}
    hook_sets = [[HookRegistry.get(name)() for name in names], [at(ActingHook, *points)(misbehaving_hook)]]
    return [trained(*make(), hooks, audit=len(names) > 3) == bare for hooks in hook_sets]


def preserved_with_default_options() -> list[bool]:
    return preserves_weights("plain", 1, ("hessian", "norms", "weight_average"))


def preserved_with_other_options() -> list[list[bool]]:
    return [preserves_weights(kind, parts) for kind in KINDS if kind != "static graph" for parts in (1, 2)]


def refusal() -> str:
    with pytest.raises(HookError, match="remove static_graph") as error:
        preserves_weights("static graph", 1)
    return str(error.value)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return on_ranks(preserved_with_default_options, tmp_path_factory.mktemp("ranks"), RANKS)


@pytest.mark.slow
@pytest.mark.guarantee("ranks-agree")
def test_hooks_preserve_weights_on_every_rank(ranks):
    """Hooks leave the weights of every rank unchanged under DistributedDataParallel."""
    assert ranks == [[True, True]] * RANKS


@pytest.mark.guarantee("ranks-agree")
@pytest.mark.slow
def test_hooks_preserve_weights_with_any_reducer_option(tmp_path):
    """The options of DDP cover bucket views, small buckets and unused parameters."""
    assert on_ranks(preserved_with_other_options, tmp_path, RANKS) == [[[True, True]] * 2 * (len(KINDS) - 1)] * RANKS


@pytest.mark.slow
def test_gradient_hooks_are_refused_with_static_graph(tmp_path):
    """With static_graph=True, DDP counts every backward pass."""
    assert all("static_graph=True" in message for message in on_ranks(refusal, tmp_path, RANKS))
