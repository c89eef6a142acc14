"""The sample of a parameter, the norms of many tensors, and the statistics over parameters."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loopscope.training_hooks.measures import splitmix64
from loopscope.training_hooks.updates.element_samples import fnv1a, sample_indices
from loopscope.training_hooks.updates.update_monitor import distribution
from loopscope.training_hooks.updates.watched_elements import WatchedElements, norms

shapes = st.lists(st.integers(1, 40), min_size=1, max_size=3).map(tuple)


def test_fnv1a_has_the_published_values():
    assert [fnv1a(text) for text in ("", "a", "foobar")] == [0xCBF29CE484222325, 0xAF63DC4C8601EC8C, 0x85944171F73967E8]


def test_splitmix64_has_the_published_values():
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert [number % 2**64 for number in splitmix64(1234567, 4).tolist()] == expected


def test_samples_never_change():
    """Other samples would break the comparison of runs, and resuming between the two checks of a step."""
    assert sample_indices("blocks.0.qkv.weight", (768, 256), 1024)[:4].tolist() == [112, 246, 397, 679]
    assert sample_indices("w", (10,), 3).tolist() == [1, 4, 8]
    assert sample_indices("w", (10,), 8).tolist() == [0, 1, 2, 3, 5, 6, 7, 9]


@given(name=st.text(max_size=20), shape=shapes, size=st.integers(1, 300))
def test_sample_is_sorted_distinct_and_repeatable(name, shape, size):
    """A tensor with no more elements than the sample is not sampled."""
    elements, indices = math.prod(shape), sample_indices(name, shape, size)
    if elements <= size:
        assert indices is None
        return
    assert indices.dtype is torch.int32
    assert len(indices) == size
    assert bool((indices.diff() > 0).all())
    assert 0 <= indices[0] <= indices[-1] < elements
    assert torch.equal(indices, sample_indices(name, shape, size))


def test_samples_depend_on_name_and_shape():
    drawn = [("a", (100,)), ("b", (100,)), ("a", (10, 10)), ("a", (101,))]
    samples = {tuple(sample_indices(name, shape, 10).tolist()) for name, shape in drawn}
    assert len(samples) == 4


@pytest.mark.longer
@pytest.mark.some_rows(2)
@pytest.mark.parametrize("size", [7, 30])
def test_elements_are_sampled_uniformly(size):
    """Counts over the names are binomial; 5 standard deviations fail once in a million, over 40 elements."""
    names = 4000
    counts = torch.zeros(40)
    for number in range(names):
        counts[sample_indices(f"layer{number}", (40,), size)] += 1
    share = size / 40
    assert ((counts - names * share).abs() < 5 * math.sqrt(names * share * (1 - share))).all()


@pytest.mark.longer
def test_the_squared_norm_of_a_sample_is_unbiased():
    values = torch.randn(500, generator=torch.Generator().manual_seed(0), dtype=torch.float64) ** 3
    drawn = [10 * values[sample_indices(f"w{number}", (500,), 50)].square().sum().item() for number in range(2000)]
    mean, deviation = torch.tensor(drawn).mean().item(), torch.tensor(drawn).std().item()
    assert mean == pytest.approx(values.square().sum().item(), abs=5 * deviation / math.sqrt(2000))


@pytest.mark.parametrize("layout", [lambda t: t, lambda t: t.t().contiguous().t(), lambda t: t[:, ::2]])
def test_sample_ignores_memory_layout(layout):
    """The sample of a transposed or strided tensor is that of the flattened tensor."""
    parameter = torch.nn.Parameter(layout(torch.randn(30, 20)))
    parameter.grad = layout(torch.randn(30, 20))
    watched = WatchedElements(50)
    watched.measure({"w": parameter}, extremes=False)
    values = watched.state_dict()["copies"]["w"]
    expected = parameter.detach().flatten()[sample_indices("w", parameter.shape, 50).long()]
    assert torch.equal(values, expected)


@pytest.mark.parametrize("order", [1, 2, math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_norms_match_float64_at_every_size(dtype, order):
    generator = torch.Generator().manual_seed(1)
    sizes = [(3,), (), (0,), (5, 7), (2**20 + 1,), (2**14,), (700, 300)]
    tensors = [torch.randn(size, generator=generator).to(dtype) for size in sizes]
    tensors.append(torch.randn(300, 200, generator=generator).to(dtype).t())
    expected = [torch.linalg.vector_norm(torch.cat([t.flatten().double(), torch.zeros(1)]), order) for t in tensors]
    assert norms(tensors, order).tolist() == pytest.approx([value.item() for value in expected], rel=1e-6)


@pytest.mark.parametrize("order", [1, 2, math.inf])
def test_nan_propagates_to_the_norm(order):
    large, small = torch.ones(2**17), torch.ones(4)
    large[12345] = small[2] = math.nan
    assert norms([large, small, torch.ones(4)], order).isnan().tolist() == [True, True, False]


@pytest.mark.longer
@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=200))
def test_statistics_match_their_definitions(values):
    statistics, count = distribution("x", values), len(values)
    assert statistics["x_min"] == min(values)
    assert statistics["x_max"] == max(values)
    assert statistics["x_median"] == pytest.approx(torch.tensor(values, dtype=torch.float64).quantile(0.5).item())
    at_most = sum(value <= statistics["x_p95"] for value in values)
    below = sum(value < statistics["x_p95"] for value in values)
    assert statistics["x_p95"] in values
    assert 20 * at_most >= 19 * count
    assert 20 * below < 19 * count


@settings(max_examples=20)
@given(st.integers(1, 2000))
def test_the_95th_percentile_has_the_index_rounded_up(count):
    exact_ceiling = (95 * count + 99) // 100
    assert distribution("x", range(1, count + 1))["x_p95"] == exact_ceiling


def test_nan_counts_as_infinity_in_distribution():
    """An empty list has no statistics."""
    assert [*distribution("x", [1.0, math.nan, 2.0]).values()] == [2.0, math.inf, 1.0, math.inf]
    assert distribution("x", []) == {}
