"""The circuits of heads compared with full products that NumPy decomposes in float64."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loopscope.training_hooks.circuits.attention import copying_score, product_spectrum
from loopscope.training_hooks.measures import effective_rank, leading_share

sizes = st.integers(1, 9)


def normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@settings(deadline=None, max_examples=40)
@given(sizes, sizes, sizes, st.integers(0, 99))
def test_product_spectrum_matches_formed_matrix(rank, rows, columns, seed):
    """NumPy decomposes the full product in float64 as the reference."""
    left, right = normal(seed, 2, rank, rows), normal(seed + 1, 2, rank, columns)
    found = product_spectrum(left, right).numpy()
    formed = np.linalg.svd(left.double().mT.numpy() @ right.double().numpy(), compute_uv=False)
    assert found.shape == (2, min(rank, rows, columns))
    np.testing.assert_allclose(found, formed[:, : found.shape[1]], atol=1e-12 * formed.max())
    np.testing.assert_allclose(formed[:, found.shape[1] :], 0, atol=1e-12 * formed.max())


@pytest.mark.longer
@settings(deadline=None, max_examples=40)
@given(sizes, sizes, st.integers(0, 99))
def test_copying_score_matches_formed_matrix(width, value_dim, seed):
    """NumPy computes the eigenvalues of the full product in float64 as the reference."""
    output, value = normal(seed, 2, width, value_dim), normal(seed + 1, 2, value_dim, width)
    eigenvalues = np.linalg.eigvals(output.double().numpy() @ value.double().numpy())
    expected = eigenvalues.real.sum(axis=-1) / np.abs(eigenvalues).sum(axis=-1)
    np.testing.assert_allclose(copying_score(output, value).numpy(), expected, atol=1e-6)


def test_copying_has_its_closed_forms():
    value = normal(0, 1, 3, 8)
    inverse = torch.linalg.pinv(value)
    quarter_turn = torch.tensor([[[0.0, -1.0], [1.0, 0.0]]])
    assert copying_score(inverse, value).item() == pytest.approx(1, abs=1e-5)
    assert copying_score(-inverse, value).item() == pytest.approx(-1, abs=1e-5)
    assert copying_score(quarter_turn, torch.eye(2)[None]).item() == pytest.approx(0, abs=1e-12)
    assert copying_score(torch.zeros(1, 8, 3), value).isnan().all()


def test_spectra_of_heads_are_independent():
    values = product_spectrum(normal(1, 3, 4, 10), normal(2, 3, 4, 12))
    ranks, shares = effective_rank(values), leading_share(values)
    for head, spectrum in enumerate(values):
        assert ranks[head].item() == pytest.approx(effective_rank(spectrum).item())
        assert shares[head].item() == pytest.approx(leading_share(spectrum).item())


def test_infinite_head_does_not_affect_others():
    left, right = normal(1, 2, 3, 5), normal(2, 2, 3, 5)
    left[0, 1, 1] = torch.inf
    assert product_spectrum(left, right).isnan().all(dim=1).tolist() == [True, False]
    assert copying_score(left.mT, right).isnan().tolist() == [True, False]
