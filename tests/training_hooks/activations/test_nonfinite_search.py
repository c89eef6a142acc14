"""The test of tensors for NaN and infinities, over dtypes, layouts and sums that overflow."""

import math

import pytest
import torch
from loopscope.training_hooks.activations.nonfinite_search import has_nonfinite, nonfinite_names

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e5m2)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_element_is_found(dtype, bad):
    finite, planted = torch.ones(3, 5).to(dtype), torch.ones(3, 5)
    planted[2, 1] = bad
    named = [("finite", finite), ("planted", planted.to(dtype)), ("count", torch.ones(2, dtype=torch.int64))]
    assert nonfinite_names(named) == ["planted"]
    assert has_nonfinite([finite, planted.to(dtype)])
    assert not has_nonfinite([finite])


@pytest.mark.parametrize("dtype", FLOATS)
def test_finite_tensors_with_infinite_sums_are_finite(dtype):
    tensor = torch.full((70_000,), torch.finfo(dtype).max, dtype=torch.float64).to(dtype)
    assert not has_nonfinite([tensor])
    assert nonfinite_names([("large", tensor)]) == []


def test_infinities_of_both_signs_are_found():
    assert has_nonfinite([torch.tensor([math.inf, -math.inf])])


def test_sparse_gradients_are_read():
    places, values = torch.tensor([[0, 2, 2]]), torch.tensor([1.0, 2.0, math.inf])
    infinite, finite = (
        torch.sparse_coo_tensor(places, numbers, (4,), check_invariants=True) for numbers in (values, torch.ones(3))
    )
    assert nonfinite_names([("infinite", infinite), ("finite", finite)]) == ["infinite"]


def test_no_tensors_are_finite():
    assert not has_nonfinite([])
    assert nonfinite_names([("empty", torch.ones(0))]) == []
