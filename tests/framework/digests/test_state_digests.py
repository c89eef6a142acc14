"""Digests of the training state: one per entry, independent of the sharding, linked in a chain."""

from functools import partial

import pytest
import torch
from loopscope.digests import link, state_digests
from loopscope.digests.entries import digests
from loopscope.state import without_on_demand
from torch import Tensor, nn

from tests.support import Case, build, differences
from tests.support.misbehaving_hooks import Scene, train_one_step
from tests.support.ranks import on_ranks


def test_digests_match_builds_and_detect_training():
    """Equal builds have equal digests, and a step changes the digest of every trained parameter."""
    (task, state), (_, again) = build(Case()), build(Case())
    initial = state_digests(state)
    assert initial == state_digests(again)
    assert initial.keys() == without_on_demand(state.digest()).keys()
    assert {len(value) for value in initial.values()} == {32}
    train_one_step(Scene(task, state))
    changed = differences(initial, state_digests(state))
    assert {f"parameters/{name}" for name, _ in task.model.named_parameters()} <= set(changed)


def test_gradients_kept_for_hooks_are_not_digested():
    """Gradients that the loop keeps for hooks are excluded, while the step counter is included."""
    _, state = build(Case())
    original = state_digests(state)
    state.loop.current_grads = state.loop.accumulated_grads = {"0.weight": torch.ones(2)}
    assert differences(original, state_digests(state)) == []
    state.loop.step += 1
    assert differences(original, state_digests(state)) == ["loop/step"]


def test_digest_leaves_training_state_unchanged():
    _, state = build(Case())
    original = state.digest()
    state_digests(state)
    assert differences(original, state.digest()) == []


def test_different_values_have_different_digests():
    """Plain values and dense, sparse, complex, meta, freed and empty tensors all have distinct digests."""
    sparse = partial(torch.sparse_coo_tensor, check_invariants=False)
    freed = torch.ones(3)
    freed.untyped_storage().resize_(0)
    values = [
        *(0.1, 0.2, 1, True, "1", None, (1, 2), [1, 2], {"a": 1}),
        *(torch.zeros(()), torch.zeros(1), torch.zeros(0), torch.zeros(0, 3), torch.zeros(1).double()),
        *(torch.zeros(1, device="meta"), freed, nn.Parameter(torch.ones(3))),
        *(sparse([[0, 1]], [1.0, 2.0], (3,)), sparse([[0, 2]], [1.0, 2.0], (3,)), sparse([[0, 1]], [1.0, 3.0], (3,))),
        *(torch.tensor([1 + 2j]), torch.tensor([1 + 2j]).conj()),
    ]
    assert len({digests({"a": value})["a"] for value in values}) == len(values)


def test_chain_link_depends_on_all_earlier_links():
    """A link depends on the step and the digests but not on the order of the entries."""
    first, other = {"a": "1", "b": "2"}, {"a": "1", "b": "3"}
    start = link("", 10, first)
    assert link("", 10, dict(reversed(first.items()))) == start
    assert len({start, link("", 11, first), link("", 10, other), link(start, 10, first), link("", 10, {})}) == 5
    assert link(start, 20, other) != link(link("", 10, other), 20, other)


def plain_tensors() -> dict[str, Tensor]:
    torch.manual_seed(0)
    shapes = {"rows": (7, 5), "columns": (4, 11), "few": (2, 3), "replicated": (6,), "sum": (3, 4), "plain": (5,)}
    tensors = {name: torch.randn(shape) for name, shape in shapes.items()}
    return tensors | {"long": torch.randn(1500, 700), "half": torch.randn(9, 3).bfloat16()}


def digests_on_three_ranks() -> list[dict[str, str]]:
    """Return the digests of distributed tensors, of the same with a change on rank 1, and of a sharded state."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh

    mesh, tensors = init_device_mesh("cpu", (3,)), plain_tensors()
    shard_dims = {"rows": 0, "columns": 1, "few": 0, "long": 1, "half": 0}
    laid_out = tensors | {
        name: distribute_tensor(tensors[name], mesh, [Shard(dim)]) for name, dim in shard_dims.items()
    }
    laid_out["replicated"] = distribute_tensor(tensors["replicated"], mesh, [Replicate()])
    laid_out["sum"] = DTensor.from_local(tensors["sum"] / 4 * (1 + (mesh.get_rank() == 0)), mesh, [Partial()])
    unchanged = digests(laid_out)
    if mesh.get_rank() == 1:
        laid_out["rows"].to_local()[1, 2] += 1
    task, state = build(Case())
    fully_shard(task.model)
    return [unchanged, digests(laid_out), state_digests(state)]


def digests_on_four_ranks() -> list[dict[str, str]]:
    """Return the digests of a layer under FSDP2 and tensor parallelism and of a tensor on a mesh, each also in full."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "layers"))
    layer = nn.Linear(5, 8)
    full_tensors = {"weight": torch.arange(40.0).view(8, 5), "bias": torch.arange(8.0)}
    layer.load_state_dict(full_tensors)
    parallelize_module(layer, mesh["layers"], ColwiseParallel())
    fully_shard(layer, mesh=mesh["data"])
    tensor = distribute_tensor(torch.arange(77.0).view(7, 11), mesh, [Shard(1), Shard(0)])
    return [
        digests(dict(layer.named_parameters())),
        digests(full_tensors),
        digests({"a": tensor}),
        digests({"a": tensor.full_tensor()}),
    ]


@pytest.mark.guarantee("runs-can-be-verified")
@pytest.mark.ranks
@pytest.mark.slow
def test_tensor_digest_is_independent_of_sharding(tmp_path):
    """Three ranks compute the digest of the unsharded tensor for every layout."""
    tensors = plain_tensors()
    _, state = build(Case())
    for laid_out, changed, sharded in on_ranks(digests_on_three_ranks, tmp_path, 3):
        assert laid_out == digests(tensors)
        assert differences(laid_out, changed) == ["rows"]
        expected = state_digests(state)
        names = [name for name in expected if name.startswith("parameters/")]
        assert names
        assert {name: sharded[name] for name in names} == {name: expected[name] for name in names}


@pytest.mark.ranks
@pytest.mark.slow
def test_tensor_digest_is_independent_of_mesh(tmp_path):
    """Four ranks on a mesh of two dimensions compute the digests of the unsharded tensors."""
    for layer, full_layer, tensor, full_tensor in on_ranks(digests_on_four_ranks, tmp_path, 4):
        assert layer == full_layer
        assert tensor == full_tensor
