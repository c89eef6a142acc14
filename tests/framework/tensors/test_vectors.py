import pytest
import torch
from loopscope.tensors import (
    accumulate,
    axpy,
    copied,
    cosine,
    dot,
    gradients,
    joint_norm,
    max_abs,
    minus,
    norm,
    overwrite,
    scaled,
    trainable,
)
from torch import Tensor, nn

SHAPES = {"weight": (40, 30), "bias": (30,), "gain": (), "empty": (0, 3)}


def drawn(seed: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}


def flat(vector: dict[str, Tensor]) -> Tensor:
    return torch.cat([value.double().reshape(-1) for value in vector.values()])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_vector_operations_match_flat_vectors(dtype):
    """Dot product, norm, cosine and maximum agree with one flat vector in every dtype."""
    a, b = drawn(1, dtype), drawn(2, dtype)
    expected = torch.stack(
        [
            flat(a) @ flat(b),
            flat(a).norm(),
            (flat(a) @ flat(b)) / (flat(a).norm() * flat(b).norm()),
            flat(a).abs().max(),
        ]
    )
    actual = torch.stack([dot(a, b), norm(a), cosine(a, b), max_abs(a)])
    assert actual.dtype in (torch.float32, torch.float64)
    torch.testing.assert_close(actual.double(), expected, rtol=2e-5, atol=1e-5)


def test_missing_name_counts_as_zeros():
    a, b = drawn(1, torch.float64), drawn(2, torch.float64)
    del a["bias"], b["weight"]
    zeros = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    full_a, full_b = zeros | a, zeros | b
    assert dot(a, b) == dot(full_a, full_b)
    assert cosine(a, b) == cosine(full_a, full_b)
    for sparse, full in ((axpy(-2.0, a, b), axpy(-2.0, full_a, full_b)), (minus(a, b), minus(full_a, full_b))):
        assert sparse.keys() == full.keys()
        assert all(torch.equal(sparse[name], full[name]) for name in full)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_norms_of_half_precision_are_reduced_in_float32(dtype):
    large = {"weight": torch.full((10_000,), 300.0, dtype=dtype)}
    assert norm(large).item() == pytest.approx(30_000, rel=1e-4)
    assert dot(large, large).item() == pytest.approx(9e8, rel=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_joint_norm_equals_torch_clipping_norm(dtype):
    """Both norms agree bit for bit."""
    for seed in range(20):
        tensors = list(drawn(seed, dtype).values())
        assert torch.equal(joint_norm(tensors), torch.nn.utils.get_total_norm(tensors))


def test_norm_spans_several_dtypes():
    mixed = drawn(1)
    mixed |= {"bias": mixed["bias"].double(), "gain": mixed["gain"].half()}
    assert norm(mixed).item() == pytest.approx(flat(mixed).norm().item(), rel=1e-6)


def test_large_vector_has_unit_cosine_with_itself():
    """The error is at most 3e-7 for three million elements."""
    large = {"weight": torch.rand(3_000_000)}
    assert cosine(large, large).item() == pytest.approx(1.0, abs=3e-7)


def test_cosine_with_zero_vector_is_nan():
    a = drawn(1)
    assert cosine(a, scaled(0.0, a)).isnan()


def test_empty_vectors_have_zero_products_and_norms():
    assert dot({}, {}) == norm({}) == max_abs({}) == 0
    assert dot({"a": torch.ones(2)}, {"b": torch.ones(2)}) == 0
    assert axpy(2.0, {}, {}) == scaled(2.0, {}) == accumulate(None, {}) == {}


def test_results_from_parameters_are_detached():
    model = nn.Linear(3, 2)
    live = trainable(model)
    vectors = [axpy(1.0, live, live), scaled(2.0, live), copied(live), accumulate(None, live), minus(live, {})]
    results = [
        dot(live, live),
        norm(live),
        cosine(live, live),
        *(value for vector in vectors for value in vector.values()),
    ]
    assert not any(result.requires_grad for result in results)


def test_results_share_no_memory_with_inputs():
    a, b = drawn(1), drawn(2)
    original = copied(a)
    for result in (axpy(0.0, {}, a), scaled(1.0, a), copied(a), accumulate(None, a), minus(a, {}), axpy(1.0, a, {})):
        overwrite(result, b)
        assert all(torch.equal(a[name], original[name]) for name in a)


def test_accumulation_is_weighted_and_in_place():
    """The vectors may differ in names and order."""
    a, b, c = drawn(1, torch.float64), drawn(2, torch.float64), drawn(3, torch.float64)
    del a["bias"], b["weight"]
    total = accumulate(None, a, 2)
    kept = total["weight"]
    total = accumulate(accumulate(total, b, 3), dict(reversed(c.items())), 5)
    expected = axpy(2.0, a, axpy(3.0, b, scaled(5.0, c)))
    assert total["weight"] is kept
    for name, value in expected.items():
        torch.testing.assert_close(total[name], value)


def test_accumulating_low_precision_does_not_stall():
    one = {"weight": torch.ones(3, dtype=torch.bfloat16)}
    total = None
    for _ in range(1000):
        total = accumulate(total, one)
    assert total["weight"].dtype == torch.float32
    assert total["weight"].tolist() == [1000.0] * 3


def test_overwriting_copies_bytes_in_place():
    """NaN and minus zero keep their bits, and the parameter object stays the same."""
    model = nn.Linear(3, 2)
    parameters, values = trainable(model), {"bias": torch.tensor([float("nan"), -0.0])}
    overwrite(parameters, values)
    overwrite(parameters, {})
    assert parameters["bias"] is model.bias
    assert torch.equal(model.bias.detach().view(torch.int32), values["bias"].view(torch.int32))


def test_gradients_omit_missing_and_repeated_parameters():
    """A parameter without a gradient is omitted, and a shared one appears once."""
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    second.weight = first.weight
    model = nn.Sequential(first, second)
    model[0].bias.requires_grad_(False)
    model(torch.ones(1, 2)).sum().backward()
    assert list(gradients(model)) == list(trainable(model)) == ["0.weight", "1.bias"]
