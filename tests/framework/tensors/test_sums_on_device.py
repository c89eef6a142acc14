"""The digests that are computed on an accelerator: their formula, and what they detect."""

import pytest
import torch
from loopscope.isolation.recorded_bytes import RecordedBytes
from loopscope.tensors import device_sums, has_device_sums
from loopscope.tensors.sums_on_device import AT_ONCE, CHUNK, _constants
from torch import Tensor, nn

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64]


def by_formula(content: bytes) -> list[int]:
    """Compute both sums with Python's integers."""
    content += bytes(-len(content) % 4)
    numbers = [int.from_bytes(content[at : at + 4], "little", signed=True) for at in range(0, len(content), 4)]
    of_position, of_chunk = (constants.tolist() for constants in _constants(torch.device("cpu")))
    sums = [
        sum(number * of_position[i][k % CHUNK] * of_chunk[i][k // CHUNK] for k, number in enumerate(numbers))
        for i in (0, 1)
    ]
    return [(value + 2**63) % 2**64 - 2**63 for value in sums]


@pytest.mark.parametrize("size", [0, 1, 3, 4, 7, 1000, 4 * CHUNK - 1, 4 * CHUNK, 4 * CHUNK + 5])
def test_sums_equal_the_formula(size):
    raw = torch.randint(0, 256, (size,), dtype=torch.uint8)
    assert device_sums(raw).tolist() == by_formula(bytes(raw.tolist()))


@pytest.mark.longer
def test_long_tensors_equal_the_formula(monkeypatch):
    """More chunks than are processed at once."""
    monkeypatch.setattr("loopscope.tensors.sums_on_device.AT_ONCE", 2)
    raw = torch.randint(0, 256, (4 * CHUNK * 3 + 40,), dtype=torch.uint8)
    assert AT_ONCE > 2
    assert device_sums(raw).tolist() == by_formula(raw.numpy().tobytes())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_depend_on_bytes_only(dtype):
    """Strides do not matter, and neither does an odd address."""
    values = torch.randint(0, 2, (6, 5)).to(dtype)
    assert torch.equal(device_sums(values), device_sums(values.t().contiguous().t()))
    longer = torch.cat([values[0, :1], values.flatten()])
    assert torch.equal(device_sums(values), device_sums(longer[1:]))


CHANGES = {
    "one bit": lambda x: x.view(torch.int32)[0, 3].bitwise_xor_(1),
    "one sign": lambda x: x[1, 2].neg_(),
    "all signs": lambda x: x.neg_(),
    "two signs": lambda x: x[0, :2].neg_(),
    "swapped rows": lambda x: x.copy_(x.flip(0)),
    "swapped neighbours": lambda x: x[0, :2].copy_(x[0, :2].flip(0)),
    "zeros": lambda x: x.zero_(),
    "doubled": lambda x: x.mul_(2),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", CHANGES)
def test_sums_detect_changes(name, dtype):
    values = torch.randn(4, 64, dtype=dtype)
    before = device_sums(values)
    if name == "one bit" and dtype is torch.float64:
        values.view(torch.int64)[0, 3].bitwise_xor_(1)
    else:
        CHANGES[name](values)
    assert (device_sums(values) != before).all()


def test_tensors_of_the_host_have_no_device_sums():
    assert not has_device_sums(torch.ones(2))
    assert not has_device_sums(torch.ones(2, device="meta"))


def test_device_without_arithmetic_is_compared_on_the_host(monkeypatch):
    """A backend may lack 64-bit integers; the bytes are then copied to the host."""

    def fail(tensor: Tensor) -> Tensor:
        raise RuntimeError("no such operation")

    monkeypatch.setattr("loopscope.isolation.recorded_bytes.has_device_sums", lambda tensor: True)
    monkeypatch.setattr("loopscope.isolation.recorded_bytes.device_sums", fail)
    weight = nn.Parameter(torch.ones(3))
    recorded = RecordedBytes([weight])
    assert recorded.changed() == []
    weight.data.add_(1)
    assert recorded.changed() == [weight]


def test_recorded_bytes_name_the_changed_tensors(monkeypatch):
    """On a device, as in host memory; tensors of another shape or that were not recorded count as changed."""
    monkeypatch.setattr("loopscope.isolation.recorded_bytes.has_device_sums", lambda tensor: True)
    first, second, third, other = (torch.full((count,), 1.5) for count in (3, 0, 700, 2))
    recorded = RecordedBytes([first, second, third])
    assert recorded.changed() == []
    third.view(torch.uint8)[7] = 1
    first.data = first.view(3, 1)
    assert {*map(id, recorded.changed())} == {id(first), id(third)}
    assert recorded.changed([second, other]) == [other]
