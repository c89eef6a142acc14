"""Vectors of shards and the model context under FSDP2 give the results of a single process."""

from typing import Any

import pytest
import torch
import torch.distributed
from loopscope.data import TensorLoader, fixed_order
from loopscope.engine import CommitRecord
from loopscope.engine.hook_calls import forward_pass
from loopscope.engine.model_context import Access, ModelContext
from loopscope.errors import LoopscopeError
from loopscope.hooks import ModelDataContext, StatePart
from loopscope.state import RandomStreams, TrainingState
from loopscope.tensors import (
    accumulate,
    axpy,
    copied,
    cosine,
    dot,
    joint_norm,
    max_abs,
    norm,
    overwrite,
    trainable,
    unsharded,
)
from loopscope.training import TrainingTask
from torch import Tensor, nn
from torch.nn import functional

from tests.support.ranks import on_two_ranks

pytestmark = pytest.mark.ranks

ROWS = 12
Results = dict[str, Tensor]


def plain_vector() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {"odd": torch.randn(5, 3), "whole": torch.randn(4), "plain": torch.randn(2), "half": torch.randn(7)}


def vector_results() -> Tensor:
    """Compute products of sharded, replicated, partial and plain tensors."""
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh

    mesh, plain = init_device_mesh("cpu", (2,)), plain_vector()
    placements = {"odd": Shard(0), "whole": Replicate(), "half": Shard(0)}
    a = {name: distribute_tensor(plain[name], mesh, [place]) for name, place in placements.items()}
    a |= {"plain": plain["plain"]}
    b = a | {"odd": distribute_tensor(plain["odd"], mesh, [Replicate()])}
    b["half"] = DTensor.from_local(plain["half"] / 2, mesh, [Partial()])
    target = copied(a)
    overwrite(target, axpy(torch.tensor(0.5), a, a))
    total = accumulate(accumulate(None, a, 2), a)
    numbers = [dot(a, b), norm(a), cosine(a, b), max_abs(a), norm(target), norm(total), joint_norm(list(a.values()))]
    return torch.stack(numbers)


def mean_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


def context(*, sharded: bool) -> ModelDataContext:
    """Make the model context of a call in the middle of a step, of a model that FSDP2 shards or does not."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.LayerNorm(7), nn.Linear(7, 3)).double()
    data = (torch.randn(ROWS, 5, dtype=torch.float64), torch.randint(3, (ROWS,)))
    if sharded:
        from torch.distributed.fsdp import fully_shard

        fully_shard(model[0])
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    task = TrainingTask(model, optimizer, TensorLoader(data, 5, fixed_order(torch.arange(ROWS))), mean_loss)
    state = TrainingState(model, optimizer, RandomStreams(7))
    state.loop.batch = next(task.loader.batches(0))
    mean_loss(model, state.loop.batch).backward()
    record, stream = CommitRecord("probe", frozenset(StatePart)), ("probe", "PRE_STEP", 1)
    parameters = list(model.parameters())
    access = Access(task, state, record, parameters, mutates=True, device=None, stream=stream, loop="epoch")
    return ModelContext(access)


def gathered(vector: dict[str, Tensor]) -> Tensor:
    return torch.cat([unsharded(value.detach()).reshape(-1) for value in vector.values()])


def context_results(ctx: ModelDataContext) -> Results:
    """Call every verb that touches parameters or gradients."""
    direction, results = copied(trainable(ctx.model)), {}
    results["loss"] = ctx.compute_batch_loss().reshape(1)
    results["batch gradient"] = gathered(ctx.compute_batch_gradients())
    results["full gradient"] = gathered(ctx.compute_gradients())
    results["curvature"] = gathered(ctx.hessian_vector_product(direction, method="finite_difference"))
    for full in (False, True):
        with ctx.branch(full=full):
            results["epoch"] = gathered(ctx.run_training_epoch(ctx.get_shuffled_loader()))
        results[f"after branch, full={full}"] = gathered(trainable(ctx.model))
    ctx.apply_perturbation(direction, 0.1)
    ctx.compute_batch_loss()
    forward_pass(ctx._state, ctx._state.loop.batch[0], (), train=True)
    results["perturbed"] = gathered(trainable(ctx.model))
    ctx.blend_parameters(direction, 0.5)
    ctx.clip_gradients(0.01)
    ctx._open.commits.apply()
    results["blended"] = gathered(trainable(ctx.model))
    results["clipped"] = gathered(
        {str(index): parameter.grad for index, parameter in enumerate(ctx.model.parameters())}
    )
    return results


def refusal(ctx: ModelDataContext) -> str:
    try:
        ctx.hessian_vector_product(trainable(ctx.model))
    except LoopscopeError as error:
        return str(error)
    return "none"


def all_results() -> dict[str, Any]:
    return {
        "vectors": vector_results(),
        "context": context_results(context(sharded=True)),
        "refusal": refusal(context(sharded=True)),
    }


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """Return the results of both processes."""
    return on_two_ranks(all_results, tmp_path_factory.mktemp("ranks"))


def test_shard_products_equal_full_vector_products(ranks):
    """Each rank holds the dot product, norm and maximum of the whole vector."""
    vector = plain_vector()
    length, largest = norm(vector).item(), max_abs(vector).item()
    expected = [length**2, length, 1.0, largest, 1.5 * length, 3 * length, length]
    assert torch.equal(ranks[0]["vectors"], ranks[1]["vectors"])
    assert ranks[0]["vectors"].tolist() == pytest.approx(expected, rel=1e-6)


def test_model_context_matches_one_process_under_fsdp(ranks):
    """Every method of the context gives the same result under FSDP2."""
    expected = context_results(context(sharded=False))
    for results in ranks:
        assert results["context"].keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(results["context"][name], value, rtol=1e-9, atol=1e-11, msg=name)


def test_exact_product_is_refused_under_fsdp(ranks):
    """FSDP2 does not support the second derivative, so the context raises an error."""
    assert "which FSDP2 does not support" in ranks[0]["refusal"]
