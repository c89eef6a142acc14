"""Measures of spectra compared with NumPy's decomposition in float64."""

import doctest

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from loopscope.training_hooks.measures import spectra


@given(st.integers(1, 12), st.integers(1, 12), st.integers(0, 2**32 - 1))
def test_singular_values_match_full_decomposition(rows, columns, seed):
    matrix = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    expected = np.linalg.svd(matrix.double().numpy(), compute_uv=False)
    (found,) = spectra.singular_values(spectra.smaller_gram(matrix)[None])
    np.testing.assert_allclose(found.numpy(), expected, atol=3e-8 * expected[0])


@pytest.mark.parametrize("shape", [(129, 300), (400, 257), (600, 600), (130, 9000)])
def test_large_matrices_are_multiplied_in_blocks(shape):
    """The lower triangle is that of the whole product, over several blocks of rows and parts of columns."""
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    wide = matrix.double() if shape[0] <= shape[1] else matrix.double().T
    torch.testing.assert_close(spectra.smaller_gram(matrix).tril(), (wide @ wide.T).tril(), rtol=1e-12, atol=1e-9)
    (found,) = spectra.singular_values(spectra.smaller_gram(matrix)[None])
    torch.testing.assert_close(found, torch.linalg.svdvals(wide), rtol=1e-9, atol=0)


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=8))
def test_ranks_are_bounded_and_scale_invariant(values):
    """Effective rank, stable rank and participation ratio are between one and the number of values."""
    spectrum = torch.tensor(values, dtype=torch.float64).sort(descending=True).values
    ranks = [spectra.effective_rank, spectra.stable_rank, spectra.participation_ratio]
    for rank in ranks:
        found = rank(spectrum).item()
        assert 1 - 1e-9 <= found <= len(values) + 1e-9
        assert rank(7 * spectrum).item() == pytest.approx(found)


def test_equal_values_give_their_count_as_rank():
    """Five equal values and three zeros have rank 5, and the two largest values have a share of 0.4."""
    spectrum = torch.cat([torch.full((5,), 2.0), torch.zeros(3)])
    assert spectra.effective_rank(spectrum).item() == pytest.approx(5)
    assert spectra.stable_rank(spectrum).item() == pytest.approx(5)
    assert spectra.participation_ratio(spectrum).item() == pytest.approx(5)
    assert spectra.leading_share(spectrum, 2).item() == pytest.approx(0.4)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_singular_values_of_nonfinite_matrix_are_nan(bad):
    matrix = torch.ones(3, 4)
    matrix[1, 2] = bad
    assert spectra.singular_values(spectra.smaller_gram(matrix)[None]).isnan().all()


def test_ranks_of_zeros_are_nan():
    assert all(rank(torch.zeros(3)).isnan() for rank in (spectra.effective_rank, spectra.stable_rank))


def test_docstring_examples_are_correct():
    outcome = doctest.testmod(spectra)
    assert outcome.attempted
    assert not outcome.failed
