"""The hooks of outputs and experts on three ranks report what one process reports, and change no byte."""

from typing import Any

import pytest
import torch
from loopscope.engine import HookManager
from loopscope.hooks import TrainingHook
from loopscope.loops import epoch_loop
from loopscope.state import RandomStreams, TrainingState
from loopscope.state.digest import digest
from loopscope.tensors import local_shards, unsharded
from loopscope.training import TrainingTask
from loopscope.training_hooks.experts import MoeRouter
from loopscope.training_hooks.outputs import OutputLogits, TokenLoss
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from tests.support import RecordingSink, run_info
from tests.support.ranks import on_ranks
from tests.training_hooks.experts.moe_models import VOCABULARY, Mixture
from tests.training_hooks.outputs.output_runs import Batches, drawn

pytestmark = pytest.mark.ranks
KINDS = ("DDP", "FSDP2", "TP")


def make_hooks() -> list[TrainingHook]:
    every = {"interval": 1, "names": "*"}
    return [OutputLogits(interval=1), TokenLoss(**every, source="2"), MoeRouter(**every)]


def loss(model: nn.Module, batch: Any) -> Tensor:
    return functional.cross_entropy(unsharded(model(batch[0])).flatten(0, 1), batch[1].flatten())


def model_of(kind: str) -> nn.Module:
    torch.manual_seed(0)
    model: Any = Mixture().double()
    if kind == "DDP":
        return DistributedDataParallel(model)
    if kind == "one process":
        return model
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    if kind == "FSDP2":
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    # The logits are sharded over the classes: each rank has a part of every row.
    plan = {"head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)}
    return parallelize_module(model, mesh, plan)


def trained(kind: str, *, hooked: bool = True) -> tuple[dict[Any, Any], list[Any]]:
    """Train two steps on a rank's rows, and return the metrics and the digests of its weights."""
    model = model_of(kind)
    part, parts = (torch.distributed.get_rank(), torch.distributed.get_world_size()) if kind in KINDS[:2] else (0, 1)
    batches = []
    for seed in (1, 2):
        tokens, labels = drawn(6, 5, high=VOCABULARY, seed=seed), drawn(6, 5, high=VOCABULARY, seed=seed + 5)
        tags = torch.tensor([0, 1, 2, 0, 1, 0])
        batches.append(tuple(tensor[part::parts] for tensor in (tokens, labels, tags)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    task = TrainingTask(model, optimizer, Batches(*batches), loss, length=1)
    state, sink = TrainingState(task.model, optimizer, RandomStreams(7)), RecordingSink()
    hooks = make_hooks() if hooked else []
    manager = HookManager(hooks, task, state, sinks=[sink], audit=True)
    manager.start(run_info(task, manager, "epoch"))
    epoch_loop(task, manager)
    manager.end("completed")
    metrics = {(name, step): value for name, _, step, value in sink.rows()}
    return metrics, [digest(value) for value in local_shards(task.model.parameters())]


def of_kinds() -> dict[str, Any]:
    return {kind: (trained(kind), trained(kind, hooked=False)) for kind in KINDS}


@pytest.fixture(scope="module")
def of_ranks(tmp_path_factory):
    return on_ranks(of_kinds, tmp_path_factory.mktemp("ranks"), 3)


@pytest.mark.slow
@pytest.mark.guarantee("ranks-agree")
@pytest.mark.parametrize("kind", KINDS)
def test_metrics_on_three_ranks_match_one_process(kind, of_ranks):
    """Sums over ranks, not means of their ratios; the bytes of the weights are those without hooks."""
    expected, _ = trained("one process")
    assert {name.split("/")[0] for name, _ in expected} == {hook.name for hook in make_hooks()}
    assert ("token_loss/source/2", 1) in expected
    for rank in of_ranks:
        (metrics, bytes_with), (_, bytes_without) = rank[kind]
        assert metrics == pytest.approx(expected, rel=1e-9, abs=1e-12)
        assert bytes_with == bytes_without
