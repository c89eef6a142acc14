"""Copies of the weights: what they measure, and when hooks share one."""

import pytest
import torch
from loopscope.tensors import trainable
from loopscope.tensors.reductions import CHUNK
from loopscope.training_hooks.measures import WeightCopy, WeightMemory
from torch import nn

from tests.training_hooks.reloading import through_a_file


def model_of(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Module()
    for place, shape in enumerate(shapes):
        model.register_parameter(f"p{place}", nn.Parameter(torch.randn(shape, dtype=dtype)))
    return model


def moved(model: nn.Module) -> None:
    """Change two thirds of the elements through ``data``, which leaves no trace in the versions."""
    for parameter in model.parameters():
        parameter.data += torch.arange(parameter.numel()).view(parameter.shape).remainder(3).to(parameter.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_movement_matches_the_whole_difference(dtype):
    """Parts of parameters, transposed and empty ones give the sums of the whole difference in float64."""
    model = model_of((3, CHUNK // 2 + 5), (7,), (0,), (), dtype=dtype)
    model.p4 = nn.Parameter(torch.randn(5, 4, dtype=dtype).T)
    parameters = trainable(model)
    copy = WeightCopy(parameters)
    before = {name: value.detach().double().clone() for name, value in parameters.items()}
    moved(model)
    changes = [value.detach().double() - before[name] for name, value in parameters.items()]
    previous = [float(value.norm()) for value in before.values()]
    assert copy.lengths(parameters).tolist() == pytest.approx(previous, rel=1e-6)
    lengths, largest, changed = copy.movement(parameters)
    expected = [float(change.norm()) for change in changes]
    assert lengths.tolist() == pytest.approx(expected, rel=1e-6)
    assert copy.distances(parameters).tolist() == pytest.approx(expected, rel=1e-6)
    assert largest.tolist() == pytest.approx([float(c.abs().max()) if c.numel() else 0 for c in changes], rel=1e-6)
    assert changed.tolist() == [int((change != 0).sum()) for change in changes]


def test_copy_follows_the_parameters():
    """The distance is that from the point before, for contiguous and transposed parameters."""
    model = model_of((CHUNK + 3,))
    model.p1 = nn.Parameter(torch.randn(5, 4).T)
    memory = WeightMemory()
    memory.reset_to(model, trainable(model), "start", "newest")
    start = memory.copies["start"]
    for _ in range(3):
        before = {name: value.detach().clone() for name, value in model.named_parameters()}
        moved(model)
        expected = [float((value.detach() - before[name]).norm()) for name, value in model.named_parameters()]
        assert memory.follow("newest", model).tolist() == pytest.approx(expected, rel=1e-6)
    assert memory.copies["newest"].equals(trainable(model))
    assert memory.copies["start"] is start
    assert not start.equals(trainable(model))


def test_hooks_share_equal_copies_only():
    """A write through ``data`` is noticed, although the versions of the parameters stay the same."""
    model, first, second = model_of((2, 3), (4,)), WeightMemory(), WeightMemory()
    first.reset_to(model, trainable(model), "start")
    second.reset_to(model, trainable(model), "before")
    assert second.copies["before"] is first.copies["start"]
    moved(model)
    second.keep("before", model)
    assert second.copies["before"] is not first.copies["start"]
    assert second.copies["before"].equals(trainable(model))
    first.keep("interval", model)
    assert first.copies["interval"] is second.copies["before"]


def test_restored_memory_shares_equal_copies():
    """The restored copies have the saved values, and share no memory with the state."""
    model, memory = model_of((2, 3)), WeightMemory()
    memory.reset_to(model, trainable(model), "start", "newest")
    moved(model)
    memory.keep("interval", model)
    state = through_a_file(memory.state_dict())
    again = WeightMemory()
    again.load_state_dict(state)
    again.parameters(model)
    assert torch.equal(again.copies["start"]["p0"], memory.copies["start"]["p0"])
    assert again.copies["newest"] is again.copies["start"]
    assert again.copies["interval"].equals(trainable(model))
    again.follow("newest", model)
    assert torch.equal(again.copies["start"]["p0"], state["vectors"]["start"]["p0"])
