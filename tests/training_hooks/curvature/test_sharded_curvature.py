"""Sharpness and range test on two FSDP2 ranks compared with one process."""

from typing import Any

import pytest
import torch
import torch.distributed
from loopscope.data import TensorLoader, fixed_order
from loopscope.engine import HookManager
from loopscope.errors import UnsuitableError
from loopscope.loops import epoch_loop
from loopscope.state import RandomStreams, TrainingState
from loopscope.state.digest import described
from loopscope.tensors import Vector, trainable
from loopscope.training import TrainingTask
from loopscope.training_hooks.curvature import Hessian, LrProbe, Sharpness
from loopscope.training_hooks.measures import FlatSpace
from torch import nn

from tests.support import RecordingSink, mean_loss, run_info
from tests.support.ranks import on_two_ranks

ROWS = 12
DIFFERENCES = {"method": "finite_difference", "epsilon": 1e-5}


def build(*, sharded: bool) -> tuple[TrainingTask, TrainingState]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.LayerNorm(7), nn.Linear(7, 3)).double()
    data = (torch.randn(ROWS, 5, dtype=torch.float64), torch.randint(3, (ROWS,)))
    if sharded:
        from torch.distributed.fsdp import fully_shard

        fully_shard(model[0])
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = TensorLoader(data, 5, fixed_order(torch.arange(ROWS)))
    return TrainingTask(model, optimizer, loader, mean_loss), TrainingState(model, optimizer, RandomStreams(7))


def measured(*, sharded: bool) -> list[dict[str, Any]]:
    """Train an epoch with the hooks, and return their metrics."""
    task, state = build(sharded=sharded)
    options = DIFFERENCES | ({"method": "auto"} if sharded else {})
    sharpness = Sharpness(batches=3, iterations=12, critical_passes=20, **options)
    sink, hooks = RecordingSink(), [sharpness, LrProbe(steps=12, smoothing=0.5)]
    manager = HookManager(hooks, task, state, sinks=[sink], audit=True)
    manager.start(run_info(task, manager, "epoch"))
    epoch_loop(task, manager)
    return [metrics for metrics, _, _, _ in sink.emitted]


def refusals() -> list[str]:
    """Return the errors of hooks with exact products on a sharded model, before any step."""
    task, state = build(sharded=True)
    said = []
    for hook in (Sharpness(method="exact"), Hessian(method="exact")):
        try:
            hook.start(run_info(task, HookManager([hook], task, state), "epoch"))
        except UnsuitableError as error:
            said.append(str(error))
    return said


def round_trip() -> bool:
    """Return whether flat vectors of sharded parameters convert back to the same shards."""
    task, _ = build(sharded=True)
    vector: Vector = trainable(task.model)
    space = FlatSpace(vector)
    back = space.vector(space.flat(vector))
    return all(torch.equal(back[name].to_local(), value.to_local()) for name, value in vector.items())  # type: ignore[attr-defined]


def all_results() -> dict[str, Any]:
    return {"metrics": measured(sharded=True), "refusals": refusals(), "round trip": round_trip()}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """Return the results of each of two processes."""
    return on_two_ranks(all_results, tmp_path_factory.mktemp("ranks"))


def doubled(name: str, value: Any) -> Any:
    """Return the expected results of two ranks that both have the rows of one process."""
    if name == "sharpness/rows":
        return 2 * value
    if name.endswith("_by_rows"):
        return {str(2 * int(rows)): number for rows, number in value.items()}
    return value


@pytest.mark.slow
def test_sharded_metrics_match_one_process(ranks):
    expected = measured(sharded=False)
    assert described(ranks[0]["metrics"]) == described(ranks[1]["metrics"])
    for found, metrics in zip(ranks[0]["metrics"], expected, strict=True):
        assert found.keys() == metrics.keys()
        for name, value in metrics.items():
            assert found[name] == pytest.approx(doubled(name, value), rel=1e-4, abs=1e-6, nan_ok=True), name


@pytest.mark.slow
def test_flat_shards_round_trip(ranks):
    """Flat vectors of sharded parameters convert back to the same shards on both ranks."""
    assert [result["round trip"] for result in ranks] == [True, True]


@pytest.mark.slow
def test_exact_products_are_refused_before_the_run(ranks):
    for name, sentence in zip(("sharpness", "hessian"), ranks[0]["refusals"], strict=True):
        assert f"Hook '{name}' needs exact Hessian-vector products" in sentence
        assert f"set {name}.method=finite_difference" in sentence
