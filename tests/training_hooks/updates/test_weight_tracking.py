"""The weight tracking hook against planted spectra and NumPy's decomposition in float64."""

import math

import numpy as np
import pytest
import torch
from loopscope.errors import UsageError
from loopscope.hooks import HookPoint
from loopscope.tensors import norm_of_each
from loopscope.training_hooks.updates import WeightTracking
from loopscope.training_hooks.updates.weight_tracking import fit_power_law, spectra_by_size
from torch import nn

from tests.support import MODELS, Case, train
from tests.training_hooks.epoch_end import epoch_end

POINTS = {HookPoint.POST_EPOCH, HookPoint.SNAPSHOT}


def planted(spectrum: torch.Tensor, rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    """Make a float32 matrix with the given singular values and random singular vectors."""
    generator = torch.Generator().manual_seed(seed)
    left, right = (
        torch.linalg.qr(torch.randn(size, len(spectrum), dtype=torch.float64, generator=generator)).Q
        for size in (rows, columns)
    )
    return (left * spectrum.double() @ right.T).float()


def model_with(**weights: torch.Tensor) -> nn.Module:
    return nn.ParameterDict({name: nn.Parameter(weight) for name, weight in weights.items()})


@torch.no_grad()
def measured(model: nn.Module, point: HookPoint = HookPoint.SNAPSHOT, **options: int) -> dict[str, torch.Tensor]:
    return WeightTracking(**options).compute(epoch_end(model, hook_point=point))


@pytest.mark.parametrize("shape", [(20, 30), (30, 20), (20, 20)])
def test_a_planted_spectrum_is_measured(shape):
    spectrum = torch.linspace(4, 0.5, 20, dtype=torch.float64)
    metrics = measured(model_with(w=planted(spectrum, *shape)))
    shares = spectrum / spectrum.sum()
    assert metrics["spectral_norm/w"].item() == pytest.approx(4, rel=1e-6)
    assert metrics["norm/w"].item() == pytest.approx(spectrum.norm().item(), rel=1e-6)
    assert metrics["stable_rank/w"].item() == pytest.approx(spectrum.square().sum().item() / 16, rel=1e-6)
    assert metrics["effective_rank/w"].item() == pytest.approx(math.exp(-(shares * shares.log()).sum()), rel=1e-6)


def test_the_exponent_of_a_planted_tail_is_recovered():
    uniform = torch.rand(200, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    eigenvalues = uniform ** (-1 / (2.5 - 1))
    metrics = measured(model_with(w=planted(eigenvalues.sqrt(), 200, 240)))
    count = metrics["alpha_tail/w"].item()
    assert abs(metrics["alpha/w"].item() - 2.5) < 4 * 1.5 / math.sqrt(count)
    assert count > 100
    assert metrics["alpha_distance/w"].item() < 1.36 / math.sqrt(count)


def test_singular_values_match_numpy():
    """Matrices of several shapes are compared with a float64 decomposition."""
    torch.manual_seed(0)
    shapes = {"a": (8, 5), "b": (5, 8), "c": (8, 8), "d": (5, 30), "e": (1, 4)}
    matrices = {name: torch.randn(shape) for name, shape in shapes.items()}
    singular_values = {
        name: values
        for names, spectra in spectra_by_size(matrices)
        for name, values in zip(names, spectra, strict=True)
    }
    assert set(singular_values) == set(shapes)
    for name, matrix in matrices.items():
        expected = np.linalg.svd(matrix.double().numpy(), compute_uv=False)
        np.testing.assert_allclose(singular_values[name].numpy(), expected, atol=3e-8 * expected[0])


def test_convolution_is_unfolded_by_filter():
    convolution = nn.Conv2d(3, 6, 5)
    rows = torch.stack([one.reshape(-1) for one in convolution.weight.detach()])
    expected = torch.linalg.matrix_norm(rows.double(), 2).item()
    assert measured(convolution)["spectral_norm/weight"].item() == pytest.approx(expected)


def test_vectors_only_have_a_norm():
    model = model_with(w=torch.randn(12, 12), b=torch.randn(12), scalar=torch.tensor(-3.0))
    metrics = measured(model)
    assert {name for name in metrics if name.endswith(("/b", "/scalar"))} == {"norm/b", "norm/scalar"}
    assert metrics["norm/scalar"].item() == 3
    total = math.sqrt(sum(value.double().square().sum().item() for value in model.values()))
    assert metrics["total_norm"].item() == pytest.approx(total, rel=1e-6)


def test_means_are_taken_over_matrices():
    model = model_with(wide=torch.randn(12, 40), tall=torch.randn(50, 15), small=torch.randn(3, 3))
    metrics = measured(model)
    for column in ("spectral_norm", "effective_rank", "stable_rank"):
        values = [metrics[f"{column}/{name}"].item() for name in model]
        assert metrics[f"mean_{column}"].item() == pytest.approx(np.mean(values), rel=1e-6)
    alphas = np.array([metrics[f"alpha/{name}"].item() for name in ("wide", "tall")])
    largest = np.array([metrics[f"spectral_norm/{name}"].item() ** 2 for name in ("wide", "tall")])
    assert "alpha/small" not in metrics
    assert metrics["mean_alpha"].item() == pytest.approx(alphas.mean())
    assert metrics["weighted_alpha"].item() == pytest.approx((alphas * np.log10(largest)).mean())


def test_fit_uses_all_eigenvalues():
    model = nn.Linear(40, 30)
    squares = np.linalg.svd(model.weight.detach().double().numpy(), compute_uv=False) ** 2
    fit = fit_power_law(torch.from_numpy(squares.copy())[None], min_tail=12)
    metrics = measured(model, min_tail=12)
    assert metrics["alpha/weight"].item() == pytest.approx(fit.exponent.item(), rel=1e-6)
    assert metrics["alpha_tail/weight"].item() == fit.count.item()


def test_small_matrices_have_no_fit():
    """The effective rank is still reported."""
    metrics = measured(nn.Linear(9, 9))
    assert not [name for name in metrics if "alpha" in name]
    assert "effective_rank/weight" in metrics


def test_a_model_of_vectors_has_no_spectra():
    assert set(measured(nn.LayerNorm(4))) == {"norm/weight", "norm/bias", "total_norm"}


def test_broken_weights_affect_no_other_matrix():
    """An infinite matrix gives NaN, a zero matrix has no rank or exponent, and means use the sound matrices."""
    broken = torch.ones(12, 12).index_fill(0, torch.tensor([3]), math.inf)
    metrics = measured(model_with(broken=broken, zero=torch.zeros(12, 12), sound=torch.randn(12, 12)))
    for column in ("spectral_norm", "effective_rank", "alpha"):
        assert metrics[f"{column}/broken"].isnan()
        assert metrics[f"{column}/sound"].isfinite()
    assert metrics["spectral_norm/zero"].item() == 0
    assert metrics["effective_rank/zero"].isnan()
    assert metrics["alpha/zero"].isnan()
    assert torch.equal(metrics["mean_alpha"], metrics["alpha/sound"])


def test_half_precision_is_reduced_in_float32():
    large = {"w": torch.full((4,), 3e4, dtype=torch.float16)}
    assert norm_of_each(large)["w"].item() == 6e4
    metrics = measured(model_with(w=torch.eye(2, dtype=torch.bfloat16) * 300))
    assert metrics["spectral_norm/w"].item() == 300


@pytest.mark.parametrize("model", MODELS)
def test_reports_follow_epochs_and_snapshots(model):
    """Norms are reported after epochs, and spectra at snapshots."""
    run = train(Case(model), [WeightTracking()], steps=6)
    reported = {point: set(metrics) for metrics, _, point, _ in run.sink.emitted}
    assert set(reported) == POINTS
    assert all(
        name.startswith(("weight_tracking/norm/", "weight_tracking/total_norm"))
        for name in reported[HookPoint.POST_EPOCH]
    )
    matrices = [name for name, weight in run.task.model.named_parameters() if weight.ndim > 1]
    assert {f"weight_tracking/effective_rank/{name}" for name in matrices} <= reported[HookPoint.SNAPSHOT]
    assert reported[HookPoint.POST_EPOCH] < reported[HookPoint.SNAPSHOT]


def test_frozen_parameters_are_omitted():
    model = nn.Linear(12, 12)
    model.weight.requires_grad_(False)
    assert set(measured(model)) == {"norm/bias", "total_norm"}


def test_a_tail_of_one_value_is_refused():
    with pytest.raises(UsageError, match="min_tail is 1; it must be at least 2"):
        WeightTracking(min_tail=1)
