import numpy as np
import pytest
import scipy.linalg
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loopscope.training_hooks.curvature.lanczos import (
    Density,
    KnownPairs,
    jackknife_error,
    lanczos,
    mean_and_error,
    rademacher,
    residuals,
)
from loopscope.training_hooks.curvature.sharpness import density_metrics
from scipy import stats
from torch import Tensor

N = 60


def symmetric(eigenvalues: Tensor, seed: int = 0) -> Tensor:
    """Return a dense symmetric matrix with these eigenvalues and random eigenvectors."""
    generator = torch.Generator().manual_seed(seed)
    size = len(eigenvalues)
    basis = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64))[0]
    return basis @ torch.diag(eigenvalues) @ basis.T


def start(size: int = N, seed: int = 1, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def clustered() -> Tensor:
    """Return a spectrum like that of networks: a bulk at zero, a cluster, three outliers, one negative."""
    bulk = torch.linspace(-0.01, 0.01, N - 14, dtype=torch.float64)
    cluster = 1 + torch.linspace(0, 1e-6, 10, dtype=torch.float64)
    return torch.cat([bulk, cluster, torch.tensor([-2.0, 5.0, 8.0, 8.1], dtype=torch.float64)])


def test_extreme_eigenvalues_match_scipy():
    """Twenty steps find the largest and smallest eigenvalues with orthonormal vectors."""
    matrix = symmetric(clustered())
    expected = scipy.linalg.eigvalsh(matrix.numpy())
    run = lanczos(matrix.mv, start(), 20)
    values, vectors = run.largest(3)
    np.testing.assert_allclose(values, expected[::-1][:3], rtol=1e-10)
    assert run.ritz()[0][0].item() == pytest.approx(expected[0], rel=1e-10)
    assert residuals(matrix.mv, values, vectors).max() < 1e-5
    torch.testing.assert_close(vectors @ vectors.T, torch.eye(3, dtype=torch.float64))


@pytest.mark.parametrize("steps", [1, 8, 16, N])
def test_smallest_residual_matches_dense_matrix(steps):
    """It is ‖Av − λv‖₂, so that an eigenvalue is within this distance of the smallest Ritz value."""
    matrix = symmetric(clustered())
    run = lanczos(matrix.mv, start(), steps)
    value, residual = run.smallest()
    vector = run.ritz()[1][:, 0] @ run.basis
    assert residual.item() == pytest.approx((matrix @ vector - value * vector).norm().item(), rel=1e-6, abs=1e-9)
    distance = np.abs(scipy.linalg.eigvalsh(matrix.numpy()) - value.item()).min()
    assert distance <= residual.item() + 1e-9


def test_full_run_finds_whole_spectrum_without_duplicates():
    """With as many steps as dimensions, clusters are resolved too."""
    matrix = symmetric(clustered())
    values = lanczos(matrix.mv, start(), N).ritz()[0]
    np.testing.assert_allclose(values, scipy.linalg.eigvalsh(matrix.numpy()), atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_basis_stays_orthonormal_after_convergence(dtype):
    diagonal = torch.cat([torch.linspace(0, 1e-3, N - 1), torch.tensor([1e3])]).to(dtype)
    basis = lanczos(lambda v: diagonal * v, start(dtype=dtype), 30).basis
    error = (basis.double() @ basis.double().T - torch.eye(30, dtype=torch.float64)).abs().max()
    assert error < 20 * torch.finfo(dtype).eps


@pytest.mark.parametrize("diagonal", [[3.0, 3.0, 3.0, 3.0], [2.0, 2.0, 0.0, 0.0], [0.0] * 4, [-1.0, -1.0, -1.0, 5.0]])
def test_repeated_eigenvalues_have_right_multiplicity(diagonal):
    """Their eigenvectors are orthonormal with tiny residuals."""
    matrix = symmetric(torch.tensor(diagonal, dtype=torch.float64))
    values, vectors = lanczos(matrix.mv, start(4), 10).largest(4)
    assert sorted(values.tolist()) == pytest.approx(sorted(diagonal), abs=1e-12)
    assert residuals(matrix.mv, values, vectors).max() < 1e-12
    assert (vectors @ vectors.T - torch.eye(4)).abs().max() < 1e-12


@pytest.mark.longer
@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(-5, 5), min_size=1, max_size=12), st.integers(1, 14), st.integers(0, 99))
def test_ritz_values_respect_spectrum_and_residual_bounds(eigenvalues, iterations, seed):
    """Each value is within the spectrum and within its residual of an eigenvalue."""
    spectrum = torch.tensor(eigenvalues, dtype=torch.float64)
    matrix = symmetric(spectrum, seed)
    run = lanczos(matrix.mv, start(len(eigenvalues), seed), iterations)
    values, vectors = run.largest(min(iterations, len(eigenvalues)))
    assert values.max() <= spectrum.max() + 1e-9
    assert values.min() >= spectrum.min() - 1e-9
    gaps = (values[:, None] - spectrum).abs().min(dim=1).values
    assert (gaps <= residuals(matrix.mv, values, vectors) + 1e-9).all()


def test_residual_is_norm_of_eigenvalue_equation():
    matrix = symmetric(torch.arange(4.0, dtype=torch.float64))
    vectors = torch.eye(4, dtype=torch.float64)[:2]
    expected = [(matrix[:, i] - 1.5 * vectors[i]).norm() for i in range(2)]
    found = residuals(matrix.mv, torch.tensor([1.5, 1.5], dtype=torch.float64), vectors)
    torch.testing.assert_close(found, torch.stack(expected))


def test_quadrature_is_exact_below_twice_its_length():
    """The moment of the start vector at twice the length is not exact."""
    matrix, first = symmetric(clustered()), start()
    first = first / first.norm()
    quadrature = lanczos(matrix.mv, first, 4).quadrature()
    nodes, weights = quadrature.nodes, quadrature.weights
    for power in range(8):
        expected = first @ torch.linalg.matrix_power(matrix, power) @ first
        assert (weights * nodes**power).sum().item() == pytest.approx(expected.item(), rel=1e-9)
    beyond = first @ torch.linalg.matrix_power(matrix, 8) @ first
    assert (weights * nodes**8).sum().item() != pytest.approx(beyond.item(), rel=1e-6)


def test_basis_averaged_density_has_spectral_moments():
    """The share of negative curvature is close to that of the spectrum."""
    matrix = symmetric(clustered())
    density = Density.of([lanczos(matrix.mv, unit, 5).quadrature() for unit in torch.eye(N, dtype=torch.float64)])
    for power in range(10):
        expected = (clustered() ** power).mean().item()
        assert density.moment(power).item() == pytest.approx(expected, rel=1e-9)
    assert density.negative_energy().item() == pytest.approx(
        (clustered().clamp(max=0).square().sum() / clustered().square().sum()).item(), rel=1e-2
    )


@pytest.mark.longer
def test_random_probes_estimate_the_moments():
    matrix = symmetric(clustered())
    probes = rademacher(N, 400, torch.Generator().manual_seed(3), matrix)
    runs = [lanczos(matrix.mv, probe, 3).quadrature() for probe in probes]
    for power in (1, 2, 3):
        samples = torch.stack([Density.of([run]).moment(power) for run in runs])
        mean, error = mean_and_error(samples)
        assert abs(mean - (clustered() ** power).mean()) < 4 * error
        assert Density.of(runs).moment(power).item() == pytest.approx(mean.item(), rel=1e-12)


def test_random_probe_trace_is_unbiased():
    """The reported error matches the scatter over 200 seeds and the variance formula."""
    matrix = symmetric(torch.linspace(-1, 3, N, dtype=torch.float64))
    means, errors = [], []
    for seed in range(200):
        probes = rademacher(N, 5, torch.Generator().manual_seed(seed), matrix)
        mean, error = mean_and_error((probes @ matrix * probes).sum(dim=1))
        means.append(mean), errors.append(error)
    centre, scatter = mean_and_error(torch.stack(means))
    assert abs(centre - matrix.trace()) < 4 * scatter
    spread = torch.stack(means).std()
    variance = 2 * (matrix.square().sum() - matrix.diagonal().square().sum()) / 5
    assert torch.stack(errors).square().mean().sqrt().item() == pytest.approx(spread.item(), rel=0.2)
    assert spread.item() == pytest.approx(variance.sqrt().item(), rel=0.2)


PROBES = 6
EVEN = torch.linspace(-1, 3, N, dtype=torch.float64)
ONE = torch.cat([torch.zeros(N - 1, dtype=torch.float64), torch.tensor([8.0], dtype=torch.float64)])


def moments(eigenvalues: Tensor) -> dict[str, float]:
    square = eigenvalues.square().sum()
    return {
        "trace": eigenvalues.sum().item(),
        "eigenvalue_rms": (square / N).sqrt().item(),
        "effective_directions": (eigenvalues.abs().sum() ** 2 / square).item(),
        "negative_energy": (eigenvalues.clamp(max=0).square().sum() / square).item(),
    }


def trials(eigenvalues: Tensor, count: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Estimate the moments ``count`` times from random probes; return deviations and stated errors by name."""
    matrix, generator = symmetric(eigenvalues), torch.Generator().manual_seed(7)
    missed: dict[str, list] = {name: [] for name in moments(eigenvalues)}
    stated: dict[str, list] = {name: [] for name in missed}
    for _ in range(count):
        probes = rademacher(N, PROBES, generator, matrix)
        runs = [lanczos(matrix.mv, probe, 12) for probe in probes]
        samples = N * torch.stack([run.diagonal[0] for run in runs])
        trace, error = mean_and_error(KnownPairs.of(runs).deflated_trace(samples, probes))
        found = density_metrics(runs, 9) | {"trace": trace, "trace_error": error}
        for name, truth in moments(eigenvalues).items():
            missed[name].append(found[name] - truth)
            stated[name].append(found[f"{name}_error"])
    return tuple({name: torch.stack(values) for name, values in each.items()} for each in (missed, stated))


TRIALS = [(300, 0.91, 0.985), pytest.param(2000, 0.93, 0.97, marks=pytest.mark.slow)]


@pytest.mark.parametrize(("count", "least", "most"), TRIALS)
@pytest.mark.statistical
def test_error_intervals_have_the_stated_coverage(count, least, most):
    """Reported errors match the scatter of the estimates."""
    missed, stated = trials(EVEN, count)
    for name, errors in stated.items():
        assert abs(missed[name].mean()) < errors.mean()
        assert errors.square().mean().sqrt().item() == pytest.approx(missed[name].std().item(), rel=0.15)
        covered = (missed[name].abs() <= stats.t.ppf(0.975, PROBES - 1) * errors).double().mean()
        assert least <= covered <= most, name


SPECTRA = {
    "one": ONE,
    "ten": torch.cat([torch.zeros(N - 10), torch.linspace(1, 2, 10)]).double(),
    "one above many": torch.cat([torch.linspace(0, 0.01, N - 1), torch.ones(1)]).double(),
    "both signs": torch.cat([torch.linspace(-0.01, 0.01, N - 2), torch.tensor([-3.0, 5.0])]).double(),
}


@pytest.mark.parametrize("name", SPECTRA)
def test_outlying_eigenvalues_are_counted_exactly(name):
    """The probes agree on them, so that their random weights do not matter, and all moments are nearly exact."""
    matrix, expected = symmetric(SPECTRA[name]), moments(SPECTRA[name])
    probes = rademacher(N, 2, torch.Generator().manual_seed(1), matrix)
    runs = [lanczos(matrix.mv, probe, 16) for probe in probes]
    found = density_metrics(runs, 12)
    for metric in ("eigenvalue_rms", "negative_energy", "effective_directions"):
        assert found[metric].item() == pytest.approx(expected[metric], rel=0.1, abs=1e-9), metric
    samples = N * torch.stack([run.diagonal[0] for run in runs])
    trace = KnownPairs.of(runs).deflated_trace(samples, probes)
    assert trace.mean().item() == pytest.approx(expected["trace"], rel=0.1)


@pytest.mark.parametrize("spectrum", ["one", "two equal", "identity", "even"])
@pytest.mark.parametrize("probes", [1, 2, 3])
def test_effective_directions_stay_in_range(spectrum, probes):
    """Also where the probes agree on no eigenvector, or there is a single probe."""
    two = torch.cat([torch.zeros(N - 2), torch.ones(2)]).double()
    spectra = {"one": ONE, "two equal": two, "identity": torch.ones(N).double(), "even": EVEN}
    matrix, size = symmetric(spectra[spectrum]), N
    for seed in range(10):
        drawn = rademacher(size, probes, torch.Generator().manual_seed(seed), matrix)
        found = density_metrics([lanczos(matrix.mv, probe, 8) for probe in drawn], 12)["effective_directions"]
        assert 1 <= found <= size * (1 + 1e-12)


def test_jackknife_matches_standard_error():
    """The jackknife of two ratios is half their distance."""
    matrix = symmetric(EVEN)
    probes = rademacher(N, 5, torch.Generator().manual_seed(3), matrix)
    runs = [lanczos(matrix.mv, probe, 4).quadrature() for probe in probes]
    samples = torch.stack([Density.of([run]).moment(2) for run in runs])
    found = jackknife_error(lambda some: Density.of(some).moment(2), runs)
    torch.testing.assert_close(found, mean_and_error(samples)[1])
    ratios = [Density.of([run]).negative_energy() for run in runs[:2]]
    found = jackknife_error(lambda some: Density.of(some).negative_energy(), runs[:2])
    torch.testing.assert_close(found, (ratios[0] - ratios[1]).abs() / 2)


def test_density_error_is_pointwise_standard_error():
    matrix = symmetric(EVEN)
    runs = [lanczos(matrix.mv, probe, 6) for probe in rademacher(N, 4, torch.Generator().manual_seed(3), matrix)]
    found = density_metrics(runs, 12)
    grid = torch.stack(found["density_grid"])
    each = torch.stack([Density.of([run]).smoothed(grid) for run in KnownPairs.of(runs).deflated(runs)])
    torch.testing.assert_close(torch.stack(found["density"]), each.mean(dim=0))
    torch.testing.assert_close(torch.stack(found["density_error"]), each.std(dim=0) / 2)


def test_probe_signs_depend_on_generator_only():
    """The dtype has no effect, probes differ, and their mean is near zero."""
    one = rademacher(1000, 2, torch.Generator().manual_seed(3), torch.empty(0))
    wide = rademacher(1000, 2, torch.Generator().manual_seed(3), torch.empty(0, dtype=torch.float64))
    assert one.dtype == torch.float32
    assert torch.equal(one.double(), wide)
    assert set(one.unique().tolist()) == {-1.0, 1.0}
    assert abs(one.mean()) < 0.1
    assert not torch.equal(one[0], one[1])


def test_smoothed_density_is_normalized():
    """It has the mean of the nodes, and is NaN if all nodes are equal."""
    density = Density(torch.tensor([-1.0, 0.0, 4.0]), torch.tensor([0.2, 0.5, 0.3]))
    grid = density.grid(50)
    values = density.smoothed(grid)
    spacing = grid[1] - grid[0]
    assert (values.sum() * spacing).item() == pytest.approx(1, abs=1e-2)
    assert ((grid * values).sum() * spacing).item() == pytest.approx(1.0, abs=2e-2)
    assert grid[0] < -1 < 4 < grid[-1]
    assert values.argmax() == (grid - 0.0).abs().argmin()
    point = Density(torch.ones(2), torch.ones(2) / 2)
    assert point.smoothed(point.grid(9)).isnan().all()
