"""The sums of a tensor equal the formula, detect every corruption, and add up over any shards."""

from math import prod
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from loopscope.digests import sums, tensor_sums
from loopscope.digests.entries import digests
from loopscope.tensors import in_bytes
from torch import Tensor

from tests.framework.digests.corruptions import CORRUPTIONS, MEASURES, missed

PAGE = Path(__file__).parents[3] / "docs" / "digests.md"
DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.complex64, torch.complex128, torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
]
shapes = st.lists(st.integers(0, 9), max_size=4)


@st.composite
def tensors(draw) -> Tensor:
    """Draw a tensor of any bytes, dtype and shape, with its dimensions in any memory order."""
    shape, dtype = draw(shapes), draw(st.sampled_from(DTYPES))
    content = draw(st.randoms(use_true_random=False)).randbytes(prod(shape) * dtype.itemsize)
    order = draw(st.permutations(range(len(shape))))
    flat = torch.frombuffer(bytearray(content) or bytearray(16), dtype=torch.uint8)[: len(content)].clone()
    flat = flat % 2 if dtype == torch.bool else flat
    laid_out = flat.view(dtype).view([shape[dim] for dim in order])
    return laid_out.permute([order.index(dim) for dim in range(len(shape))])


def bytes_of(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def sums_by_formula(content: bytes, start: int = 0) -> list[int]:
    """Compute both sums by the formula in the module's docstring, with Python integers."""
    projection, weights = (table.tolist() for table in tensor_sums._constants(torch.device("cpu")))
    # S[i] = sum over bytes and columns j of x * R[k, j] * P[i, b, j] * Q[i, c], modulo 2**64
    totals = [0, 0]
    for position, byte in enumerate(content, start):
        block, inside = divmod(position, 1024)
        chunk, block = divmod(block, 2048)
        factors = tensor_sums._of_chunk(chunk, torch.device("cpu")).tolist()
        signed = byte - 256 if byte > 127 else byte
        for i in range(2):
            columns = zip(projection[inside], weights[i][16 * block : 16 * block + 16], strict=True)
            totals[i] += signed * factors[i] * sum(r * p for r, p in columns)
    return [(total + 2**63) % 2**64 - 2**63 for total in totals]


@pytest.mark.longer
@given(tensors())
def test_sums_match_the_formula(tensor):
    assert sums(tensor).tolist() == sums_by_formula(bytes_of(tensor))


def test_digest_constants_match_existing_records():
    """A change of the constants would invalidate recorded digests."""
    assert sums(torch.arange(5000.0)).tolist() == CONSTANT


CONSTANT = [-4107546890572157914, -2984730789834667656]


@pytest.mark.longer
@given(tensors(), st.data())
def test_digest_depends_on_name_dtype_shape_and_bytes(tensor, data):
    """A flipped bit, another name, shape or dtype changes it; the memory format does not."""
    entry = digests({"a": tensor})
    assert digests({"a": tensor.clone(memory_format=torch.contiguous_format)}) == entry
    assert digests({"b": tensor})["b"] != entry["a"]
    assert digests({"a": tensor[None]}) != entry
    if tensor.dtype.itemsize > 1:
        assert digests({"a": tensor.contiguous().reshape(-1).view(torch.uint8)}) != entry
    if tensor.numel():
        content = bytearray(bytes_of(tensor))
        bit = 0 if tensor.dtype == torch.bool else data.draw(st.integers(0, 7))
        content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << bit
        other = torch.frombuffer(content, dtype=torch.uint8).view(tensor.dtype).view(tensor.shape)
        assert digests({"a": other}) != entry


@pytest.mark.longer
@pytest.mark.guarantee("runs-can-be-verified")
@given(tensors(), st.data())
def test_sums_of_parts_add_up(tensor, data):
    """The sums of the parts of a tensor add up to the sum of the tensor, however it is split."""
    parts = [((0,) * tensor.dim(), tensor)]
    for dimension, size in enumerate(tensor.shape):
        cut = data.draw(st.integers(0, size))
        parts = [
            ((*at[:dimension], at[dimension] + begin, *at[dimension + 1 :]), part.narrow(dimension, begin, length))
            for at, part in parts
            for begin, length in ((0, cut), (cut, size - cut))
        ]
    assert sum(sums(part, at, tensor.shape) for at, part in parts).tolist() == sums(tensor).tolist()


def test_one_element_may_have_any_stride():
    strided = torch.arange(4.0).view(2, 2)[:, 1].narrow(0, 0, 1)
    assert strided.is_contiguous()
    assert strided.stride() == (2,)
    assert torch.equal(sums(strided), sums(torch.tensor([1.0])))
    assert torch.equal(in_bytes(strided), in_bytes(torch.tensor([1.0])))


@pytest.mark.parametrize("cut", [1, 1023, 1024, 2**21 - 1, 2**21, 2**21 + 5, 2**22])
def test_chunked_tensor_parts_add_up(cut):
    """The sums do not depend on the split of a large tensor."""
    tensor = torch.randint(256, (2**22 + 2**21 + 3000,), dtype=torch.uint8)
    total = sums(tensor)
    assert torch.equal(total, sums(tensor[:cut]) + sums(tensor[cut:], [cut], tensor.shape))
    assert torch.equal(total, sums(tensor, at_once=64))


def test_scattered_parts_of_large_tensor_add_up():
    """The parts are column blocks."""
    tensor = torch.randn(700, 3000)
    pieces = [(0, tensor[:, :1001]), (1001, tensor[:, 1001:])]
    assert torch.equal(sums(tensor), sum(sums(part, [0, at], tensor.shape) for at, part in pieces))


def test_chunks_and_blocks_have_different_weights():
    tensor = torch.zeros(2**22 + 2000, dtype=torch.uint8)
    positions = [0, 1, 1024, 1025, 2**21, 2**21 + 1, 2**22, 2**22 + 1024]
    assert sums_by_formula(b"\7", positions[-1]) == sums(tensor[:1] + 7, [positions[-1]], tensor.shape).tolist()
    distinct_sums = {tuple(sums(tensor.index_fill(0, torch.tensor(index), 7)).tolist()) for index in positions}
    assert len(distinct_sums) == len(positions)


def test_sums_do_not_depend_on_vnni_support(monkeypatch):
    """Both ways of the matrix product, in bytes and in float32, give the same sums, also under autocast."""
    tensor = torch.full((300, 1024), -128, dtype=torch.int8)
    tensor[100:] = torch.randint(-128, 128, (200, 1024))
    expected = sums(tensor)
    for supported in (True, False):
        monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda supported=supported: supported)
        with torch.autocast("cpu"):
            assert torch.equal(sums(tensor), expected)


@pytest.mark.longer
@pytest.mark.some_rows(3)
@pytest.mark.guarantee("runs-can-be-verified")
@pytest.mark.parametrize("corruption", CORRUPTIONS)
@pytest.mark.parametrize("trials", [300, pytest.param(10_000, marks=pytest.mark.slow)])
def test_every_corruption_is_detected(corruption, trials):
    """The documented rates of other checksums that miss a corruption are confirmed."""
    torch.manual_seed(trials)
    counts = missed(corruption, trials)
    assert counts["loopscope-1"] == 0
    (row,) = [line for line in PAGE.read_text("utf-8").splitlines() if line.startswith(f"| {corruption} |")]
    for name, cell in zip(MEASURES, row.split("|")[2:], strict=False):
        documented = 0 if cell.strip() == "none" else int(cell.removesuffix(" % "))
        assert counts[name] == 0 if documented == 0 else abs(100 * counts[name] / trials - documented) < 10
