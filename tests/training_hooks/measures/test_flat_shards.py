"""Flat vectors in one process, and hooks that use them on two ranks compared with one process."""

from typing import Any

import pytest
import torch
import torch.distributed
from loopscope.data import TensorLoader, fixed_order
from loopscope.engine import HookManager
from loopscope.hooks import TrainingHook
from loopscope.loops import epoch_loop
from loopscope.state import RandomStreams, TrainingState, without_on_demand
from loopscope.training import TrainingTask
from loopscope.training_hooks.gradients import Consecutive, Variance
from loopscope.training_hooks.measures import FlatLayout, FlatMemory, FlatSpace
from loopscope.training_hooks.updates import ParameterDelta, PathLength
from torch import nn
from torch.nn import functional

from tests.support import RecordingSink, run_info
from tests.support.ranks import on_two_ranks

ROWS = 12


def layout_of(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> FlatLayout:
    return FlatLayout({f"p{n}": nn.Parameter(torch.randn(shape, dtype=dtype)) for n, shape in enumerate(shapes)})


def test_flat_vector_concatenates_parameters():
    layout = layout_of((2, 3), (4,), ())
    expected = torch.cat([parameter.detach().flatten() for parameter in layout.parameters.values()])
    assert torch.equal(layout.values().data, expected)
    assert FlatSpace(layout.parameters).size == 11


def test_missing_tensor_counts_as_zeros():
    """copy() sets missing entries to zero, and add() leaves them unchanged."""
    layout = layout_of((2,), (3,))
    vector = layout.values()
    layout.copy({"p1": torch.ones(3)}, vector)
    assert vector.data.tolist() == [0, 0, 1, 1, 1]
    layout.add({"p0": torch.full((2,), 2.0)}, vector)
    assert vector.data.tolist() == [2, 2, 1, 1, 1]
    assert layout.copy({}, vector).data.tolist() == [0] * 5


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_parameters_count_both_parts(dtype):
    """Products are those of real and imaginary parts, and a vector has the same shapes again."""
    layout = layout_of((2, 3), (4,), dtype=dtype)
    a, b = layout.values(), layout.copy({"p0": torch.randn(2, 3, dtype=dtype)}, layout.zeros())
    exact = (a.data.to(torch.complex128) * b.data.to(torch.complex128).conj()).real
    torch.testing.assert_close(layout.dot(a.data, b.data), exact.sum(), rtol=1e-5, atol=1e-6)
    parts = torch.stack([exact[:6].sum(), exact[6:].sum()])
    torch.testing.assert_close(layout.dots(a.data, b.data), parts, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(layout.norm(a.data), a.data.to(torch.complex128).norm(), rtol=1e-5, atol=1e-6)
    space = FlatSpace(layout.parameters)
    flat = space.flat(layout.parameters)
    assert (space.size, flat.dtype) == (20, torch.float64 if dtype is torch.complex128 else torch.float32)
    assert all(torch.equal(value, layout.parameters[name]) for name, value in space.vector(flat).items())


def test_vector_does_not_share_parameter_memory():
    layout = layout_of((2, 2))
    vector = layout.values()
    copy = vector.data.clone()
    layout.parameters["p0"].data.zero_()
    assert torch.equal(vector.data, copy)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_flat_sums_match_sums_over_parts(dtype):
    """Dot products match those of the parts, in at least float32."""
    layout = layout_of((7, 5), (3,), (0,), dtype=dtype)
    a, b = layout.values(), layout.copy({"p0": torch.randn(7, 5)}, layout.zeros())
    assert a.data.dtype == torch.promote_types(dtype, torch.float32)
    parts = zip(a.views, b.views, strict=True)
    products = [float((x.double() * y.double()).sum()) for x, y in parts]
    assert layout.dots(a.data, b.data).tolist() == pytest.approx(products, rel=1e-5, abs=1e-6)
    assert float(layout.dot(a.data, b.data)) == pytest.approx(sum(products), rel=1e-5, abs=1e-6)


def test_restored_memory_finds_model_parameters():
    """After load_state_dict(), the memory has the same parameter names and values."""
    model = nn.Linear(3, 2)
    memory = FlatMemory()
    memory.vectors = {"here": memory.reset_to(dict(model.named_parameters())).values()}
    again = FlatMemory()
    again.load_state_dict(memory.state_dict())
    layout = again.layout(model)
    assert layout.names == ["weight", "bias"]
    assert torch.equal(layout.values().data, again.vectors["here"].data)


# Two processes


def build(*, sharded: bool) -> tuple[TrainingTask, TrainingState]:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.LayerNorm(7), nn.Linear(7, 3))
    data = (torch.randn(ROWS, 5), torch.randint(3, (ROWS,)))
    if sharded:
        fully_shard(model[0])
        fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    loader = TensorLoader(data, 5, fixed_order(torch.arange(ROWS)))
    task = TrainingTask(
        model,
        optimizer,
        loader,
        lambda model, batch: functional.cross_entropy(model(batch[0]), batch[1]),
        evaluate=lambda model: {"val_loss": float(functional.cross_entropy(model(data[0]), data[1]))},
        length=4,
    )
    return task, TrainingState(model, optimizer, RandomStreams(7))


def run(hooks: list[TrainingHook], *, sharded: bool) -> tuple[dict[tuple[str, int], float], dict[str, int]]:
    """Train for four epochs, and return all reported metrics and the final digest."""
    task, state = build(sharded=sharded)
    sink = RecordingSink()
    manager = HookManager(hooks, task, state, sinks=[sink], audit=True)
    manager.start(run_info(task, manager, "epoch"))
    epoch_loop(task, manager)
    manager.end("completed")
    if sharded:
        task.model[0].reshard(), task.model.reshard()
    return {(name, step): value for name, _, step, value in sink.rows()}, without_on_demand(state.digest())


def made() -> list[TrainingHook]:
    return [PathLength(every=1), ParameterDelta(), Consecutive(), Variance(window=4, every=2)]


def all_results() -> dict[str, Any]:
    numbers, digest = run(made(), sharded=True)
    return {"numbers": numbers, "same": digest == run([], sharded=True)[1]}


@pytest.mark.ranks
@pytest.mark.slow
def test_two_ranks_match_one_process(tmp_path):
    """Two ranks report the metrics of one process and train like without hooks."""
    first, second = on_two_ranks(all_results, tmp_path)
    expected, _ = run(made(), sharded=False)
    assert first["same"]
    assert second["same"]
    assert first["numbers"] == second["numbers"]
    assert {name.split("/")[0] for name, _ in expected} == {hook.name for hook in made()}
    assert first["numbers"] == pytest.approx(expected, rel=1e-3, abs=1e-5)
