"""The low-rank cast against NumPy's decomposition in float64, on known spectra and on degenerate matrices."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loopscope.errors import UsageError
from loopscope.lowbit import MetisOptions
from loopscope.lowbit.casts import Cast
from loopscope.lowbit.metis import low_rank_cast, randomised_svd
from torch import Tensor

BLOCK = Cast("e2m1", "block")
SHAPES = [(24, 16), (16, 24), (20, 20), (1, 9), (9, 1)]


def source(seed: int = 1) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def planted(rows: int, columns: int, spectrum: Tensor, seed: int = 2) -> Tensor:
    """Make a matrix with given singular values and random singular vectors, float64."""
    rank = len(spectrum)
    draws = [torch.randn(size, rank, generator=source(seed + size), dtype=torch.float64) for size in (rows, columns)]
    left, right = (torch.linalg.qr(draw)[0] for draw in draws)
    return (left * spectrum.double()) @ right.mT


def long_tail(rank: int) -> Tensor:
    """Return singular values with a few large ones and a slowly falling tail."""
    return 100.0 * torch.arange(1, rank + 1).double() ** -1.5


def identity(x: Tensor) -> Tensor:
    return x


# The decomposition


@pytest.mark.parametrize("shape", SHAPES)
def test_full_rank_decomposition_matches_numpy(shape):
    matrix = planted(*shape, spectrum=torch.linspace(9.0, 1.0, min(shape)))
    u, s, v = randomised_svd(matrix, min(shape), 0, source())
    left, values, right = np.linalg.svd(matrix.numpy(), full_matrices=False)
    torch.testing.assert_close(s.numpy(), values, rtol=1e-12, atol=1e-12)
    components = torch.einsum("ik,kj->kij", u, v)
    expected = np.einsum("ik,kj->kij", left, right)
    torch.testing.assert_close(components.numpy(), expected, rtol=1e-9, atol=1e-10)


def test_low_rank_matrix_is_recovered_exactly():
    """No power iteration is needed."""
    matrix = planted(40, 30, torch.tensor([5.0, 3.0, 1.0]))
    torch.testing.assert_close(randomised_svd(matrix, 3, 0, source()).product(), matrix)


@pytest.mark.parametrize("niter", [0, 1, 4])
def test_mean_error_is_within_the_published_bound(niter):
    """Theorem 10.5 of Halko et al. with oversampling p: E‖M − QQᵀM‖² ≤ (1 + k/(p − 1))·Σ_{j>k} σ_j²."""
    spectrum = long_tail(60)
    matrix, kept, extra = planted(80, 60, spectrum), 10, 10
    errors = [
        (matrix - randomised_svd(matrix, kept + extra, niter, source(seed)).product()).square().sum()
        for seed in range(20)
    ]
    assert torch.stack(errors).mean() <= (1 + kept / (extra - 1)) * spectrum[kept:].square().sum()


def test_power_iterations_reach_the_optimal_error():
    spectrum = long_tail(60)
    matrix = planted(80, 60, spectrum)
    error = matrix - randomised_svd(matrix, 10, 60, source()).product()
    torch.testing.assert_close(error.norm(), spectrum[10:].norm(), rtol=1e-6, atol=0)


@pytest.mark.longer
@given(st.integers(1, 12), st.integers(1, 12), st.integers(0, 2), st.sampled_from([1e-42, 1e-30, 1.0, 1e30, 1e37]))
@settings(max_examples=60, deadline=None)
def test_factors_are_orthonormal_with_fixed_signs(rows, columns, niter, size):
    """This holds for every shape and magnitude; singular values are sorted and not negative."""
    matrix = torch.randn(rows, columns, generator=source(3)) * size
    u, s, v = randomised_svd(matrix, min(rows, columns), niter, source())
    torch.testing.assert_close(u.mT @ u, torch.eye(len(s)), rtol=0, atol=1e-5)
    torch.testing.assert_close(v @ v.mT, torch.eye(len(s)), rtol=0, atol=1e-5)
    assert (s >= 0).all()
    assert (s.diff() <= 0).all()
    assert (v.gather(1, v.abs().argmax(1, keepdim=True)) > 0).all()


@pytest.mark.parametrize("matrix", [torch.zeros(6, 4), torch.ones(6, 4), torch.eye(6)[:, :4] * 0 + 1e-45], ids=str)
def test_zero_and_rank_deficient_matrices_are_decomposed(matrix):
    parts = randomised_svd(matrix, 4, 0, source())
    assert all(part.isfinite().all() for part in parts)
    torch.testing.assert_close(parts.product(), matrix, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32(dtype):
    matrix = planted(20, 16, long_tail(16)).to(dtype)
    half, single = (randomised_svd(given, 8, 0, source()) for given in (matrix, matrix.float()))
    assert all(torch.equal(a, b) and a.dtype == torch.float32 for a, b in zip(half, single, strict=True))


def test_decomposition_uses_only_the_given_generator():
    before, matrix = torch.get_rng_state(), planted(20, 16, long_tail(16))
    one, again, other = (randomised_svd(matrix, 4, 0, source(seed)).s for seed in (1, 1, 2))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    assert torch.equal(torch.get_rng_state(), before)


# The cast


@pytest.mark.parametrize("cast", [BLOCK, Cast("e4m3", "tensor"), Cast("e2m1", "mx_rceil")], ids=str)
@pytest.mark.parametrize("gains", ["none", "long_tail"])
@pytest.mark.parametrize("shape", [(24, 16), (16, 24)])
def test_cast_matches_numpy_composition(shape, gains, cast):
    matrix = planted(*shape, spectrum=long_tail(16))
    left, values, right = np.linalg.svd(matrix.numpy(), full_matrices=False)
    signs = np.sign(right[np.arange(16), np.abs(right).argmax(1)])
    u, v = torch.tensor(left * signs), torch.tensor(right * signs[:, None])
    residual = matrix - torch.tensor((left * values) @ right)
    factor, rest = ([1.0] * 16, 1.0) if gains == "none" else ([1.0] * 5 + [1.5] * 11, 2.0)
    scaled = torch.tensor(values) * torch.tensor(factor)
    expected = (cast(u.mT.contiguous()).mT * scaled) @ cast(v) + rest * cast(residual)
    found = low_rank_cast(matrix, cast, MetisOptions(rank=16, gains=gains), source())
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("gains", ["none", "long_tail"])
def test_gains_scale_the_singular_values(gains):
    """Without rounding, the singular values of the result are the gains times those of the matrix."""
    spectrum = torch.tensor([80.0, 40.0, 20.0, 10.0, 5.0, 2.0, 1.0, 0.25, 0.125, 0.0625])
    found = low_rank_cast(planted(30, 20, spectrum), identity, MetisOptions(8, gains=gains, niter=20), source())
    gain = [1.0] * 10 if gains == "none" else [1.0] * 5 + [1.5] * 3 + [2.0] * 2
    expected = spectrum.double() * torch.tensor(gain)
    torch.testing.assert_close(torch.linalg.svdvals(found)[:10], expected, rtol=1e-9, atol=1e-9)


def test_published_scaling_order_gives_other_gains():
    """Scaling before the residual turns 1.5 into 1.5 + 2·(1 − 1.5) = 0.5, which is why our order differs."""
    spectrum = torch.tensor([80.0, 40.0, 20.0, 10.0, 5.0, 2.0, 1.0, 0.25])
    matrix = planted(30, 20, spectrum)
    parts = randomised_svd(matrix, 7, 20, source())
    gains, rest = torch.tensor([1.0] * 5 + [1.5] * 2), 2.0
    early = parts._replace(s=parts.s * gains)
    published = early.product() + rest * (matrix - early.product())
    expected = torch.sort(spectrum * torch.tensor([1, 1, 1, 1, 1, 0.5, 0.5, 2.0]), descending=True).values
    torch.testing.assert_close(torch.linalg.svdvals(published)[:8], expected.double(), rtol=1e-9, atol=1e-9)


def test_cast_without_gain_or_rounding_is_identity():
    matrix = planted(30, 20, long_tail(20))
    torch.testing.assert_close(low_rank_cast(matrix, identity, MetisOptions(4), source()), matrix)


FP4 = pytest.mark.parametrize("cast", [Cast("e2m1", "tensor"), BLOCK, Cast("e2m1", "nvfp4")], ids=lambda c: c.rule)


@FP4
@pytest.mark.parametrize("seed", range(3))
def test_low_rank_cast_keeps_the_spectral_tail(seed, cast):
    """The tail of a long-tailed spectrum has less than half the relative error of a direct cast."""
    matrix = planted(128, 96, long_tail(96), seed).float()
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)

    def error_of_the_tail(found: Tensor) -> Tensor:
        """Return the mean relative error of the last third of the components."""
        return (((u.mT @ found @ v.mT).diagonal() - s) / s).abs()[64:].mean()

    metis = low_rank_cast(matrix, cast, MetisOptions(rank=0.25), source(seed))
    assert error_of_the_tail(metis) < 0.5 * error_of_the_tail(cast(matrix))


@FP4
@pytest.mark.parametrize("seed", range(3))
def test_compensated_cast_beats_direct_cast(seed, cast):
    """The error is below 30 % of the error of a direct cast."""
    matrix = planted(128, 96, long_tail(96), seed).float()
    direct = (cast(matrix) - matrix).norm()
    options = MetisOptions(rank=0.25, compensated=True)
    assert (low_rank_cast(matrix, cast, options, source(seed)) - matrix).norm() < 0.3 * direct


def test_compensated_cast_only_rounds_the_residual():
    """With rounded factors and an exact residual the matrix is recovered."""
    matrix, factors_cast = planted(24, 16, long_tail(16)), iter([BLOCK, BLOCK, identity])
    found = low_rank_cast(matrix, lambda x: next(factors_cast)(x), MetisOptions(6, compensated=True), source())
    torch.testing.assert_close(found, matrix)


def test_compensated_gains_have_nominal_values():
    spectrum, factors_cast = torch.tensor([64.0, 32, 16, 8, 4, 2, 1, 0.25]), iter([BLOCK, BLOCK, identity])
    options = MetisOptions(7, gains="long_tail", niter=20, compensated=True)
    found = low_rank_cast(planted(30, 20, spectrum), lambda x: next(factors_cast)(x), options, source())
    expected = spectrum.double() * torch.tensor([1, 1, 1, 1, 1, 1.5, 1.5, 2])
    torch.testing.assert_close(torch.linalg.svdvals(found)[:8], expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_nonfinite_gradient_stays_nonfinite_without_error(value, dtype):
    matrix = torch.randn(12, 8, generator=source()).to(dtype)
    matrix[3, 4] = value
    found = low_rank_cast(matrix, BLOCK, MetisOptions(4), source())
    assert found.dtype == dtype
    assert found.isnan().all()


@pytest.mark.parametrize("shape", [(0, 8), (8, 0), (1, 1), (3, 8)])
def test_few_or_no_tokens_can_be_decomposed(shape):
    matrix = torch.randn(shape, generator=source())
    found = low_rank_cast(matrix, identity, MetisOptions(60), source())
    torch.testing.assert_close(found, matrix)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_the_result_has_the_type_of_the_matrix(dtype):
    assert low_rank_cast(planted(12, 8, long_tail(8)).to(dtype), BLOCK, MetisOptions(4), source()).dtype == dtype


# The options


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"rank": 0}, "rank of Metis is 0"),
        ({"rank": 1.5}, "rank of Metis is 1.5"),
        ({"rank": float("nan")}, "rank of Metis is nan"),
        ({"rank": True}, "rank of Metis is True"),
        ({"gains": "long_tial"}, "Did you mean 'long_tail'"),
        ({"niter": -1}, "niter of Metis is -1"),
        ({"merge_steps": -1}, "merge_steps of Metis is -1"),
        ({"forward_warmup_steps": -2}, "forward_warmup_steps of Metis is -2"),
    ],
)
def test_invalid_options_are_refused(options, said):
    with pytest.raises(UsageError, match=said):
        MetisOptions(**options)


@pytest.mark.parametrize(("rank", "found"), [(60, 8), (4, 4), (0.5, 4), (0.01, 1)])
def test_rank_is_a_count_or_a_fraction(rank, found):
    """The fraction refers to the smaller dimension of the matrix, and the rank is at least one."""
    assert MetisOptions(rank=rank).rank_of((20, 8)) == found


@pytest.mark.parametrize("matrix", [torch.ones(4, 4, dtype=torch.int32), torch.ones(4, 4, dtype=torch.complex64)])
def test_integer_and_complex_matrices_are_refused(matrix):
    with pytest.raises(UsageError, match="cannot be cast to a narrow format"):
        low_rank_cast(matrix, BLOCK, MetisOptions(2), source())
