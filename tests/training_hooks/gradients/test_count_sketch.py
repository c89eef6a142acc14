"""The count sketch against its definition in plain integers, and its errors against the stated ones."""

import doctest
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loopscope.errors import UsageError
from loopscope.training_hooks.gradients import gradient_history as module
from loopscope.training_hooks.gradients.gradient_history import CHUNK, check_dimensions, count_sketch

from tests.training_hooks.gradients import gradient_feed
from tests.training_hooks.gradients.gradient_feed import cosine_error

DIMENSIONS = 1024
ELEMENTS = 20_000


def hash_in_integers(place: int, multiplier: int, offset: int) -> int:
    """Hash one index with Python's integers, modulo 2³²."""
    hashed = (place * multiplier + offset) % 2**32
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        hashed = (hashed ^ hashed >> shift) * factor % 2**32
    return hashed ^ hashed >> 16


def pairs_with_cosine(cosine: float, count: int, draw) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Make pairs of vectors with exactly this cosine, in float64, from vectors that ``draw`` returns."""
    pairs = []
    for _ in range(count):
        one, other = draw().double(), draw().double()
        one /= one.norm()
        other -= (other @ one) * one
        other /= other.norm()
        pairs.append((one, cosine * one + math.sqrt(1 - cosine**2) * other))
    return pairs


def sketched_cosine(one: torch.Tensor, other: torch.Tensor, key: int = 0) -> float:
    a, b = (count_sketch(vector, DIMENSIONS, key).double() for vector in (one, other))
    return (a @ b / (a.norm() * b.norm())).item()


def heavy_columns() -> torch.Tensor:
    return torch.randn(200, 100) * (torch.arange(100) % 32 == 0) + 1e-3 * torch.randn(200, 100)


SHAPES = {
    "gaussian": lambda: torch.randn(ELEMENTS),
    "heavy tails": lambda: torch.randn(ELEMENTS) * torch.randn(ELEMENTS).exp(),
    "low rank": lambda: torch.outer(torch.randn(200), torch.randn(100)).flatten(),
    "heavy columns": lambda: heavy_columns().flatten(),
    "few rows": lambda: (torch.randn(200, 100) * (torch.arange(200) % 40 == 0)[:, None]).flatten(),
}


@given(st.integers(1, 300), st.integers(0, 2**20))
@settings(max_examples=20, deadline=None)
def test_elements_land_in_hashed_buckets(elements, key):
    """The bucket and sign of every element match the hash in plain Python integers."""
    vector = torch.arange(1.0, elements + 1)
    ((multiplier, offset),) = module.chunk_keys(key, 1)
    expected = [0.0] * 64
    for place in range(elements):
        hashed = hash_in_integers(place, multiplier, offset)
        expected[hashed % 64] += (-1 if hashed >= 2**31 else 1) * (place + 1)
    assert count_sketch(vector, 64, key).tolist() == expected


@pytest.mark.some_rows(3)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("cosine", [-0.9, -0.3, 0.0, 0.1, 0.5, 0.95])
def test_cosines_stay_within_four_standard_errors(cosine, shape):
    """The bound holds for every pair of vectors, from Gaussian to low-rank ones."""
    torch.manual_seed(1)
    error = cosine_error(cosine, DIMENSIONS)
    for one, other in pairs_with_cosine(cosine, 40, SHAPES[shape]):
        assert abs(sketched_cosine(one, other) - cosine) < 4 * error + 1e-6


@pytest.mark.longer
@pytest.mark.some_rows(2)
@pytest.mark.parametrize("cosine", [0.0, 0.5, 0.9])
def test_measured_error_matches_the_stated_one(cosine):
    torch.manual_seed(2)
    pairs = pairs_with_cosine(cosine, 400, SHAPES["gaussian"])
    measured = torch.tensor([sketched_cosine(*pair) - cosine for pair in pairs]).square().mean().sqrt().item()
    assert measured / cosine_error(cosine, DIMENSIONS) == pytest.approx(1, abs=0.15)


@pytest.mark.longer
@pytest.mark.some_rows(3)
@pytest.mark.parametrize("shape", SHAPES)
def test_projection_family_error_is_as_stated(shape):
    """Over 300 keys, one pair has no bias and a root-mean-square error of at most 1.15 times the stated one."""
    torch.manual_seed(3)
    ((one, other),) = pairs_with_cosine(0.2, 1, SHAPES[shape])
    errors = torch.tensor([sketched_cosine(one, other, key) - 0.2 for key in range(300)])
    stated = cosine_error(0.2, DIMENSIONS)
    assert errors.square().mean().sqrt().item() < 1.15 * stated
    assert abs(errors.mean().item()) < 4 * stated / math.sqrt(300)


def test_vectors_of_one_direction_keep_their_cosine_exactly():
    vector = torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(4))
    assert sketched_cosine(vector, 2 * vector) == pytest.approx(1, abs=1e-12)
    assert sketched_cosine(vector, -4 * vector) == pytest.approx(-1, abs=1e-12)


def test_the_sketch_is_linear_over_several_chunks():
    generator = torch.Generator().manual_seed(5)
    one, other = torch.randn(2, 2 * CHUNK + 77, generator=generator)
    sketch_of_sum = count_sketch(one - 3 * other, DIMENSIONS)
    sum_of_sketches = count_sketch(one, DIMENSIONS) - 3 * count_sketch(other, DIMENSIONS)
    torch.testing.assert_close(sketch_of_sum, sum_of_sketches, atol=2e-3, rtol=0)


def test_chunks_are_hashed_independently():
    torch.manual_seed(6)
    part = torch.randn(CHUNK)
    first = count_sketch(torch.cat([part, torch.zeros(CHUNK)]), DIMENSIONS)
    second = count_sketch(torch.cat([torch.zeros(CHUNK), part]), DIMENSIONS)
    cosine = torch.nn.functional.cosine_similarity(first, second, dim=0)
    assert abs(cosine.item()) < 4 * cosine_error(0.0, DIMENSIONS)


def test_sketch_is_deterministic_without_random_draws():
    """Another key gives another sketch."""
    vector = torch.linspace(-1, 1, 5000)
    state = torch.get_rng_state()
    first = count_sketch(vector, DIMENSIONS)
    assert torch.equal(first, count_sketch(vector, DIMENSIONS))
    assert torch.equal(state, torch.get_rng_state())
    assert not torch.equal(first, count_sketch(vector, DIMENSIONS, key=1))


@pytest.mark.parametrize("dimensions", [-64, 32, 100, 16383])
def test_dimensions_must_be_power_of_two(dimensions):
    """Negative values and powers of two that are too small are refused as well."""
    with pytest.raises(UsageError, match=f"some.projection is {dimensions}; it must be 0 .* power of two"):
        check_dimensions("some.projection", dimensions)


@pytest.mark.parametrize("dimensions", [0, 64, 16384])
def test_zero_and_powers_of_two_are_accepted(dimensions):
    check_dimensions("some.projection", dimensions)


def test_examples_are_right():
    outcome = doctest.testmod(gradient_feed)
    assert outcome.attempted
    assert not outcome.failed
