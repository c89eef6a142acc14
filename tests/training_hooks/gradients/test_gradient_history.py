"""The history of gradients against numpy in float64: its products, its ring, its spectrum."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loopscope.errors import UnsuitableError
from loopscope.training_hooks.gradients.gradient_history import (
    GradientHistory,
    check_memory,
    count_sketch,
    row_products,
    spectrum,
)
from torch import nn


class Vector(nn.Module):
    """A model with one parameter and a given gradient."""

    def __init__(self, size: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size, dtype=dtype))

    def with_gradient(self, gradient: torch.Tensor) -> "Vector":
        self.weight.grad = gradient
        return self


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def numpy_gram(rows: torch.Tensor) -> np.ndarray:
    wide = rows.double().numpy()
    return wide @ wide.T


@pytest.mark.longer
@given(st.integers(1, 6), st.lists(st.integers(1, 5), min_size=1, max_size=6))
@settings(max_examples=40, deadline=None)
def test_gram_matrix_covers_newest_gradients(capacity, pauses):
    """The products match NumPy in order, however often they are requested."""
    gradients = noise(sum(pauses), 30)
    model, history, count = Vector(30), GradientHistory(capacity), 0
    for pause in pauses:
        for gradient in gradients[count : count + pause]:
            history.append(model.with_gradient(gradient))
        count += pause
        expected = numpy_gram(gradients[max(0, count - capacity) : count])
        np.testing.assert_allclose(history.gram().numpy(), expected, rtol=1e-5, atol=1e-5)


def test_wide_products_keep_float32_precision():
    """Products over 200,000 columns match float64 to 1e-6."""
    rows = noise(12, 200_000) + 1
    expected = numpy_gram(rows)
    np.testing.assert_allclose(row_products(rows[:1], rows).numpy(), expected[:1], rtol=1e-6)
    np.testing.assert_allclose(row_products(rows, rows).numpy(), expected, rtol=1e-6)


def test_the_rows_are_copies_of_the_gradients():
    model, history = Vector(5), GradientHistory(2)
    history.append(model.with_gradient(torch.ones(5)))
    model.weight.grad.zero_()
    assert history.gram().item() == 5


def test_missing_gradients_are_zero_and_frozen_omitted():
    model = nn.Sequential(nn.Linear(3, 1), nn.Linear(2, 1))
    model[1].bias.requires_grad_(False)
    model[0].weight.grad = torch.full((1, 3), 2.0)
    history = GradientHistory(2)
    history.append(model)
    assert history.gram().item() == 12
    assert history.state_dict()["rows"].shape == (2, 6)


def test_changed_gradient_width_restarts_history():
    model, history = nn.Linear(3, 1), GradientHistory(4)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    history.append(model)
    model.bias.requires_grad_(False)
    history.append(model)
    assert history.count == 1
    assert history.gram().tolist() == [[3.0]]


def test_history_dtype_is_at_least_float32():
    """Low-precision gradients are kept in float32, and float64 ones in float64."""
    for dtype, kept in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        history = GradientHistory(2)
        history.append(Vector(3, dtype).with_gradient(torch.ones(3, dtype=dtype)))
        assert history.state_dict()["rows"].dtype == kept
        assert history.resolution == torch.finfo(kept).eps


def test_a_projected_history_keeps_sketches():
    gradients = noise(3, 5000)
    model, history = Vector(5000), GradientHistory(3, projection=256)
    for gradient in gradients:
        history.append(model.with_gradient(gradient))
    sketches = torch.stack([count_sketch(gradient, 256) for gradient in gradients])
    assert history.state_dict()["rows"].shape == (3, 256)
    np.testing.assert_allclose(history.gram().numpy(), numpy_gram(sketches), rtol=1e-4)


def test_history_resumes_from_its_state():
    """This holds with pending gradients and after the ring buffer wraps around."""
    gradients = noise(9, 20)
    model, history = Vector(20), GradientHistory(4)
    for number, gradient in enumerate(gradients):
        if number in (2, 7):
            state, history = history.state_dict(), GradientHistory(4)
            history.load_state_dict(state)
        if number == 4:
            history.gram()
        history.append(model.with_gradient(gradient))
    np.testing.assert_allclose(history.gram().numpy(), numpy_gram(gradients[5:]), rtol=1e-5, atol=1e-6)


def test_reset_history_frees_its_memory():
    history = GradientHistory(4)
    history.append(Vector(3).with_gradient(torch.ones(3)))
    history.reset()
    assert history.state_dict()["rows"] is None
    assert len(history) == 0


def test_spectrum_matches_svd_with_zero_rounding_noise():
    """Eigenvalues below the resolution are exactly zero."""
    rows = (noise(12, 3, seed=1) @ noise(3, 50_000, seed=2)).float()
    values, vectors = spectrum(row_products(rows, rows), torch.finfo(torch.float32).eps)
    expected = np.linalg.svd(rows.double().numpy(), compute_uv=False) ** 2
    np.testing.assert_allclose(values[:3].numpy(), expected[:3], rtol=1e-5)
    assert values[3:].tolist() == [0.0] * 9
    np.testing.assert_allclose((vectors.T @ vectors).numpy(), np.eye(12), atol=1e-12)


def test_nonfinite_gradient_gives_nan_spectrum():
    gram = torch.eye(3, dtype=torch.float64)
    gram[1, 1] = torch.inf
    assert spectrum(gram, 1e-7)[0].isnan().all()


def test_oversized_history_is_refused_with_a_remedy():
    """The error states the memory and suggests a projection."""
    model = nn.Linear(2**18, 1, bias=False)
    check_memory("some", 10, 10, model, 0)
    check_memory("some", 10, 40, model, 2**16)
    with pytest.raises(UnsuitableError, match=r"'some' keeps 11 gradients, which take 11 MiB .*'projection': 16384"):
        check_memory("some", 10, 11, model, 0)
    with pytest.raises(UnsuitableError, match="take 12 MiB"):
        check_memory("some", 10, 6, model.double(), 0)


def test_default_memory_grows_with_model() -> None:
    """128 MiB with small models, and with larger ones as much as the parameters."""
    small, large = (nn.Linear(2**power, 1, bias=False, device="meta") for power in (20, 27))
    check_memory("some", None, 32, small, 0)
    with pytest.raises(UnsuitableError, match=r"132 MiB .* some.memory allows 128"):
        check_memory("some", None, 33, small, 0)
    check_memory("some", None, 1, large, 0)
    with pytest.raises(UnsuitableError, match=r"1,024 MiB .* some.memory allows 512"):
        check_memory("some", None, 2, large, 0)
