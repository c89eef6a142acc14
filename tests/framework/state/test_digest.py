import itertools
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from loopscope.state import InternalFunction, differing, without_on_demand
from loopscope.state.digest import described, digest
from torch import nn

from tests.support import Case, build, differences
from tests.support.misbehaving_hooks import Scene, train_one_step

FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_digest_depends_on_element_order(dtype):
    tensor = torch.tensor([1.0, 2.0, 4.0]).to(dtype)
    assert digest(tensor) == digest(tensor.clone())
    orders = [torch.tensor([1.0, 2.0, 4.0])[list(order)].to(dtype) for order in itertools.permutations(range(3))]
    assert len(set(map(digest, orders))) == 6


def test_zeros_and_ones_of_any_length_differ():
    tensors = [fill(length) for fill in (torch.zeros, torch.ones) for length in range(1, 20)]
    assert len(set(map(digest, tensors))) == len(tensors)


def test_digest_depends_on_shape_and_dtype():
    bits = torch.arange(12, dtype=torch.int32)
    variants = [bits, bits.view(3, 4), bits.view(4, 3), bits.view(torch.float32), bits.view(torch.int8), bits[None]]
    assert len(set(map(digest, variants))) == len(variants)


@pytest.mark.parametrize("tensor", [torch.ones(3, 4), torch.ones(3, 4).t(), torch.ones(9)[2:7]])
def test_tensor_with_shrunk_storage_has_own_digest(tensor):
    """The digest does not read the missing storage."""
    original = digest(tensor)
    tensor.untyped_storage().resize_(0)
    assert digest(tensor) not in (original, digest(torch.empty(0)))


def test_digest_does_not_depend_on_memory_layout():
    tensor = torch.arange(6.0).view(2, 3)
    assert digest(tensor.t().contiguous().t()) == digest(tensor)
    assert digest(torch.ones(1).expand(5)) == digest(torch.ones(5))


def test_digest_depends_on_zero_sign_and_nan_payload():
    patterns = torch.tensor([0, -(2**31), 0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert len({digest(value) for value in patterns}) == 4


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_digest_detects_writes_without_version_change(dtype):
    tensor = torch.zeros(300).to(dtype)
    original, version = digest(tensor), tensor._version
    tensor.data.view(torch.uint8)[7] = 1
    assert tensor._version == version
    assert digest(tensor) != original


@given(st.binary(min_size=1, max_size=64), st.integers(0, 2**31))
def test_digest_depends_on_every_bit(content, bit):
    tensor = torch.tensor(list(content), dtype=torch.uint8)
    other = tensor.clone()
    bit %= 8 * len(content)
    other[bit // 8] ^= 1 << (bit % 8)
    assert digest(tensor) != digest(other)


def test_complex_views_are_digested_by_their_values():
    tensor = torch.tensor([1 + 2j])
    assert digest(tensor.conj()) == digest(tensor.conj().resolve_conj()) != digest(tensor)


def test_sparse_digest_covers_indices_and_values():
    make = partial(torch.sparse_coo_tensor, check_invariants=False)
    variants = [make([[0, 1]], [1.0, 2.0], (3,)), make([[0, 2]], [1.0, 2.0], (3,)), make([[0, 1]], [1.0, 3.0], (3,))]
    assert len(set(map(digest, variants))) == 3


def test_reading_a_tensor_leaves_its_storage_resizable():
    tensor = torch.ones(4)
    digest(tensor)
    tensor.untyped_storage().resize_(0)
    assert tensor.untyped_storage().nbytes() == 0


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.1, "0.1"),
        (float("nan"), "nan"),
        (-0.0, "-0.0"),
        ((1, True, None), "(1, True, None)"),
        ({"b", "a"}, "{'a', 'b'}"),
        ([nn.Linear, len], "[torch.nn.modules.linear.Linear, builtins.len]"),
        (nn.ReLU(), "torch.nn.modules.activation.ReLU"),
        (torch.float32, "torch.float32"),
    ],
)
def test_descriptions_are_exact_and_without_addresses(value, text):
    assert described(value) == text


def test_equal_values_of_different_types_differ():
    assert len({described(value) for value in (1, True, 1.0, "1")}) == 4


def test_digest_is_reproducible_and_detects_a_step():
    """Two builds have equal digests, and a step changes that of every trained parameter."""
    (task, state), (_, again) = build(Case()), build(Case())
    original = state.digest()
    assert original == again.digest()
    train_one_step(Scene(task, state))
    changed = differing(original, state.digest())
    assert {f"parameters/{name}" for name, _ in task.model.named_parameters()} <= set(changed)


def test_gradients_kept_for_hooks_are_not_digested():
    """The step counter is."""
    _, state = build(Case())
    original = without_on_demand(state.digest())
    state.loop.current_grads = state.loop.accumulated_grads = {"0.weight": torch.ones(2)}
    assert differences(original, without_on_demand(state.digest())) == []
    state.loop.step += 1
    assert differences(original, without_on_demand(state.digest())) == ["loop/step"]


def test_digest_covers_hooks_except_framework_taps():
    """Hooks on modules count by their code."""
    _, state = build(Case())
    original = state.digest()

    state.model[0].register_forward_hook(InternalFunction(lambda module, inputs, output: None))
    assert differences(original, state.digest()) == []
    state.model[0].register_forward_hook(lambda module, inputs, output: None)
    assert differences(original, state.digest()) == ["module hooks/0._forward_hooks/0/code"]
