"""Isolation under FSDP2: on both processes, runs with and without hooks are identical."""

from typing import Any

import pytest
import torch
import torch.distributed
from loopscope.data import TensorLoader, fixed_order
from loopscope.engine import HookManager
from loopscope.errors import StateMutationError
from loopscope.hooks import HookPoint
from loopscope.loops import epoch_loop
from loopscope.state import RandomStreams, TrainingState, without_on_demand
from loopscope.training import TrainingTask, forward_backward, update
from torch import nn
from torch.nn import functional

from tests.support import ActingHook, DigestTrace, SpyHook, at, differences
from tests.support.ranks import on_two_ranks

pytestmark = pytest.mark.slow
ROWS = 12
POINTS = (HookPoint.PRE_STEP, HookPoint.POST_BACKWARD, HookPoint.POST_STEP, HookPoint.POST_EPOCH)


def mean_loss(model, batch):
    return functional.cross_entropy(model(batch[0]), batch[1])


def build() -> tuple[TrainingTask, TrainingState]:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Dropout(0.2), nn.Tanh(), nn.LayerNorm(7), nn.Linear(7, 3))
    data = (torch.randn(ROWS, 5), torch.randint(3, (ROWS,)))
    fully_shard(model[0])
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    task = TrainingTask(
        model,
        optimizer,
        TensorLoader(data, 5, fixed_order(torch.arange(ROWS))),
        mean_loss,
        evaluate=lambda model: {"val_loss": float(mean_loss(model, data))},
        length=2,
    )
    return task, TrainingState(model, optimizer, RandomStreams(7))


def run(hooks=(), *, audit=True) -> list[dict[str, int]]:
    """Train for two epochs and return the digests of this rank after every step and at the end."""
    task, state = build()
    trace = DigestTrace(state)
    epoch_loop(task, HookManager(hooks, task, state, audit=audit), progress=trace)
    task.model[0].reshard(), task.model.reshard()
    return [*trace.digests, without_on_demand(state.digest())]


# Mutations; they take the model, the task and a batch


def train_on(model, task, batch):
    forward_backward(task, batch)
    update(task, step_scheduler=True)


def gather(model, task, batch):
    model.unshard()
    model[0].unshard()
    with torch.no_grad():
        model[0].weight.zero_()


def forward_only(model, task, batch):
    model(batch[0])


def write_to_shards(model, task, batch):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.to_local().zero_()
            parameter.grad = None


def write_to_shards_through_data(model, task, batch):
    for parameter in model.parameters():
        parameter._local_tensor.data.add_(1)
    for state in task.optimizer.state.values():
        state["exp_avg"]._local_tensor.data.add_(1)


def replace_shards(model, task, batch):
    for parameter in model.parameters():
        parameter._local_tensor = torch.rand_like(parameter._local_tensor)
        parameter.requires_grad_(False)


def replace_parameters(model, task, batch):
    model[0].weight = nn.Parameter(model[0].weight.detach() * 2)
    task.optimizer.state.clear()


MUTATIONS = {
    mutation.__name__: mutation
    for mutation in (
        train_on,
        gather,
        forward_only,
        write_to_shards,
        write_to_shards_through_data,
        replace_shards,
        replace_parameters,
    )
}


def intervene(name):
    def act(run_ctx, model_ctx):
        batch = run_ctx.batch_data or next(model_ctx.loader.batches(0))
        MUTATIONS[name](model_ctx.model, model_ctx._task, batch)

    return run([at(ActingHook, *POINTS)(act)])


def use_the_model_context(run_ctx, model_ctx):
    batch = next(model_ctx.loader.batches(0))
    with model_ctx.branch():
        model_ctx.run_training_epoch(model_ctx.get_shuffled_loader())
    gradients = model_ctx.compute_batch_gradients(batch)
    model_ctx.apply_perturbation(gradients, 0.5)
    return {"loss": model_ctx.compute_batch_loss(batch)}


def observe(name) -> str:
    """Apply a mutation in an observer and return the error message."""
    task, state = build()

    def compute(ctx):
        MUTATIONS[name](ctx.model, task, ctx.batch_data)

    manager = HookManager([at(SpyHook, HookPoint.POST_STEP)(compute)], task, state, audit=True)
    try:
        epoch_loop(task, manager)
    except StateMutationError as error:
        return str(error)
    return "unnoticed"


def all_results() -> dict[str, Any]:
    results: dict[str, Any] = {name: intervene(name) for name in MUTATIONS}
    results["bare"] = run(audit=False)
    results["model context"] = run([at(ActingHook, *POINTS)(use_the_model_context)])
    results["spy"] = run([SpyHook(lambda ctx: {"draw": torch.rand(())})])
    results["observed"] = {name: observe(name) for name in ("write_to_shards_through_data", "write_to_shards")}
    return results


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """Return the results of both processes."""
    return on_two_ranks(all_results, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", [*MUTATIONS, "model context", "spy"])
def test_no_hook_leaves_a_trace_on_any_rank(ranks, name):
    for results in ranks:
        assert [differences(*pair) for pair in zip(results["bare"], results[name], strict=True)] == [[]] * 7


def test_observer_writing_to_shards_is_caught_everywhere(ranks):
    """Both ranks report the hook, the point and the step."""
    for results in ranks:
        for text in results["observed"].values():
            assert "Hook 'spy' at POST_STEP of step 1 may only read, but changed the training state" in text


def test_ranks_have_different_shards(ranks):
    assert ranks[0]["bare"][-1]["parameters/0.weight"] != ranks[1]["bare"][-1]["parameters/0.weight"]
