"""Every rule of grad_clip, and gradient_flow, on two processes under FSDP2 against the same runs on one."""

import math
from typing import Any

import pytest
import torch
import torch.distributed
from loopscope.data import TensorLoader, fixed_order
from loopscope.engine import HookManager
from loopscope.errors import HookError
from loopscope.hooks import HookPoint, TrainingHook
from loopscope.loops import epoch_loop
from loopscope.state import RandomStreams, TrainingState
from loopscope.tensors import trainable, unsharded
from loopscope.training import TrainingTask
from loopscope.training_hooks.clipping import GradClip
from loopscope.training_hooks.gradients import GradientFlow
from torch import nn

from tests.support import RecordingSink, mean_loss, run_info
from tests.support.ranks import on_two_ranks

ROWS = 12
RULES: dict[str, dict[str, Any]] = {
    "norm": {"max_norm": 0.3},
    "value": {"max_value": 0.05},
    "parameter": {"max_norm": 0.2},
    "zclip": {"warmup": 3, "z_threshold": 0.3},
    "adagc": {"warmup": 3, "lambda_abs": 0.4},
}


def build(*, sharded: bool) -> tuple[TrainingTask, TrainingState]:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.LayerNorm(7), nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 3))
    model.double()
    data = (torch.randn(ROWS, 5, dtype=torch.float64), torch.randint(3, (ROWS,)))
    if sharded:
        for block in (model[0], model[3]):
            fully_shard(block)
        fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    loader = TensorLoader(data, 5, fixed_order(torch.arange(ROWS)))
    task = TrainingTask(model, optimizer, loader, mean_loss, length=4)
    return task, TrainingState(model, optimizer, RandomStreams(7))


def run(hook: TrainingHook, *, sharded: bool) -> dict[str, Any]:
    """Train for four epochs; return every number that the hook reported, and the weights at the end."""
    task, state = build(sharded=sharded)
    sink = RecordingSink()
    manager = HookManager([hook], task, state, sinks=[sink], audit=True)
    manager.start(run_info(task, manager, "epoch"))
    epoch_loop(task, manager)
    manager.end("completed")
    if sharded:
        task.model[0].reshard(), task.model[3].reshard(), task.model.reshard()
    numbers = {f"{name} {step}": value for name, _, step, value in sink.rows()}
    return {"numbers": numbers, "weights": {name: unsharded(p.detach()) for name, p in trainable(task.model).items()}}


def made() -> dict[str, TrainingHook]:
    clips: dict[str, TrainingHook] = {rule: GradClip(method=rule, **options) for rule, options in RULES.items()}
    return clips | {"flow": GradientFlow(interval=1, vanishing_gain=1e-6)}


def refusal_of_partial_sums() -> str:
    from torch.distributed.tensor import DTensor, Partial, init_device_mesh

    task, state = build(sharded=True)
    mesh = init_device_mesh("cpu", (2,))
    for parameter in task.model.parameters():
        parameter.grad = DTensor.from_local(torch.ones(parameter.shape, dtype=torch.float64), mesh, [Partial()])
    try:
        HookManager([GradClip(method="value")], task, state).fire(HookPoint.POST_BACKWARD)
    except HookError as error:
        return str(error)
    return "none"


def all_results() -> dict[str, Any]:
    return {name: run(hook, sharded=True) for name, hook in made().items()} | {"refusal": refusal_of_partial_sums()}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return on_two_ranks(all_results, tmp_path_factory.mktemp("ranks"))


@pytest.mark.slow
@pytest.mark.parametrize("name", made())
def test_two_ranks_report_and_train_as_one_does(ranks, name):
    expected = run(made()[name], sharded=False)
    for metric in expected["numbers"]:
        if metric.startswith("gradient_flow/norm/"):  # both ranks take the same rows, at half weight
            expected["numbers"][metric] /= math.sqrt(2)
    for rank in ranks:
        assert rank[name]["numbers"] == pytest.approx(expected["numbers"], rel=1e-6, abs=1e-9, nan_ok=True)
        for parameter, value in expected["weights"].items():
            torch.testing.assert_close(rank[name]["weights"][parameter], value, rtol=1e-7, atol=1e-9)
    if name != "flow":
        clipped = [value for metric, value in expected["numbers"].items() if metric.startswith("grad_clip/clipped ")]
        assert 0 < sum(clipped) <= len(clipped) == 12


@pytest.mark.slow
def test_partial_sums_are_not_clamped(ranks):
    for rank in ranks:
        assert "clamp_gradients needs complete or sharded gradients" in rank["refusal"]
