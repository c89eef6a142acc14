"""Copies of the weights: what they measure, and when hooks share one."""

from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from loopscope.tensors import trainable
from loopscope.tensors.reductions import CHUNK
from loopscope.training_hooks.measures import WeightCopy, WeightMemory, stored_tensors, weight_copies
from loopscope.training_hooks.measures.stored_tensors import StoredTensors
from torch import nn

from tests.training_hooks.reloading import through_a_file

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.complex64)


@pytest.fixture(autouse=True, params=[weight_copies.SMALLEST_FILE, 0], ids=["memory", "file"])
def smallest_file(request, monkeypatch):
    """Run every test with copies in memory, and with those in a temporary file that may be there."""
    monkeypatch.setattr(weight_copies, "SMALLEST_FILE", request.param)
    return request.param


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
    lengths, largest, changed, previous_lengths = copy.movement(parameters)
    assert previous_lengths.tolist() == pytest.approx(previous, rel=1e-6)
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
        now = {name: value.detach().to(torch.complex128) for name, value in model.named_parameters()}
        expected = [float((value - before[name]).norm()) for name, value in now.items()]
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


@pytest.mark.parametrize("is_rarely_read", [False, True])
def test_kept_copies_may_be_in_a_file(smallest_file, is_rarely_read):
    model, memory = model_of((2, 3)), WeightMemory()
    memory.reset_to(model, trainable(model), "start", "newest")
    memory.follow("newest", model, is_rarely_read=is_rarely_read)
    in_file = {name: isinstance(copy._copies, StoredTensors) for name, copy in memory.copies.items()}
    assert in_file == {"start": smallest_file == 0, "newest": smallest_file == 0 and is_rarely_read}


@pytest.mark.parametrize("dtype", DTYPES)
def test_followed_copies_are_overwritten_in_their_place(dtype):
    model, memory = model_of((3, 2), (), (0,), dtype=dtype), WeightMemory()
    model.p3 = nn.Parameter(torch.randn(5, 4, dtype=dtype).T)
    memory.reset_to(model, trainable(model), "newest")
    expected = [0.0] * 4
    for _ in range(3):
        distances = memory.follow("newest", model, is_rarely_read=True)
        assert distances.tolist() == pytest.approx(expected, rel=1e-6)
        assert memory.copies["newest"].equals(trainable(model))
        before = {name: value.detach().clone() for name, value in model.named_parameters()}
        moved(model)
        now = {name: value.detach().to(torch.complex128) for name, value in model.named_parameters()}
        expected = [float((value - before[name]).norm()) for name, value in now.items()]


def test_a_file_that_fills_becomes_memory(monkeypatch):
    def failing(self, name, tensor):
        raise OSError("No space left on device")

    monkeypatch.setattr(StoredTensors, "replace", failing)
    model, memory = model_of((2, 3)), WeightMemory()
    memory.reset_to(model, trainable(model), "newest")
    memory.follow("newest", model, is_rarely_read=True)
    for _ in range(2):
        moved(model)
        assert memory.follow("newest", model, is_rarely_read=True) > 0
        assert memory.copies["newest"].equals(trainable(model))
        assert isinstance(memory.copies["newest"]._copies, dict)


@pytest.mark.parametrize("size", [(4,), (2**16,)])
@pytest.mark.parametrize("folder", ["missing", "full"])
def test_copies_without_a_file_are_in_memory(folder, size, monkeypatch):
    """A folder for temporary files that is missing or full costs memory, not the copy."""

    def failing(**options):
        raise FileNotFoundError("No usable temporary directory found")

    full = partial(Path("/dev/full").open, "w+b")
    monkeypatch.setattr(stored_tensors, "TemporaryFile", failing if folder == "missing" else full)
    model, memory = model_of(size), WeightMemory()
    memory.reset_to(model, trainable(model), "start")
    assert isinstance(memory.copies["start"]._copies, dict)
    assert memory.copies["start"].equals(trainable(model))


@given(st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 4), max_size=3)), max_size=4))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_stored_tensors_are_read_in_any_order(kinds):
    """Every dtype and shape, the empty one included, has the bytes that were written."""
    tensors = {str(place): torch.randn(shape, dtype=dtype) for place, (dtype, shape) in enumerate(kinds)}
    stored = StoredTensors(tensors.items())
    assert [*stored] == [*tensors]
    for name in reversed(tensors):
        assert stored[name].dtype == tensors[name].dtype
        assert torch.equal(stored[name], tensors[name])


def test_a_shortened_file_is_an_error():
    stored = StoredTensors([("weight", torch.randn(4))])
    stored._file.truncate(8)
    with pytest.raises(OSError, match="copy of 'weight' is shorter"):
        stored["weight"]


def test_stored_tensors_are_replaced_alone():
    tensors = {str(place): torch.randn(4) for place in range(3)}
    stored = StoredTensors(tensors.items())
    tensors["1"] = torch.randn(4)
    stored.replace("1", tensors["1"])
    assert all(torch.equal(stored[name], tensor) for name, tensor in tensors.items())
