"""The weight tracking hook against planted spectra and NumPy's decomposition in float64."""

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from loopscope.errors import UsageError
from loopscope.hooks import HookPoint
from loopscope.tensors import norm_of_each
from loopscope.training_hooks.updates import WeightTracking
from loopscope.training_hooks.updates.weight_tracking import edge_excess, spectra_by_size
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


def test_a_model_of_vectors_has_no_spectra():
    assert set(measured(nn.LayerNorm(4))) == {"norm/weight", "norm/bias", "total_norm"}


def test_broken_weights_affect_no_other_matrix():
    """An infinite matrix gives NaN, a zero matrix has no rank, and means use the sound matrices."""
    broken = torch.ones(12, 12).index_fill(0, torch.tensor([3]), math.inf)
    metrics = measured(model_with(broken=broken, zero=torch.zeros(12, 12), sound=torch.randn(12, 12)))
    for column in ("spectral_norm", "effective_rank", "edge_excess"):
        assert metrics[f"{column}/broken"].isnan()
        assert metrics[f"{column}/sound"].isfinite()
    assert metrics["spectral_norm/zero"].item() == 0
    assert metrics["effective_rank/zero"].isnan()
    assert metrics["edge_excess/zero"].isnan()
    assert torch.equal(metrics["mean_effective_rank"], metrics["effective_rank/sound"])


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


def test_large_model_reports_twenty_series_per_family(tmp_path):
    """The means and the file are those of all matrices, and named matrices are reported in addition."""
    model = model_with(**{f"w{index:02}": (index + 1) * torch.eye(3) for index in range(30)})
    hook = WeightTracking(names="w15", write_all=True)
    hook.start(SimpleNamespace(model=model, output_dir=tmp_path, strategy="only"))
    with torch.no_grad():
        metrics = hook.compute(epoch_end(model, hook_point=HookPoint.SNAPSHOT))
    chosen = [f"spectral_norm/w{index:02}" for index in [*range(10), 15, *range(20, 30)]]
    assert [name for name in metrics if name.startswith("spectral_norm/")] == chosen
    assert metrics["mean_spectral_norm"] == pytest.approx(15.5)
    for family in ("norm", "effective_rank", "stable_rank", "edge_excess"):
        assert 20 <= len([name for name in metrics if name.startswith(f"{family}/")]) <= 21
    line = json.loads((tmp_path / "only.weight_tracking.jsonl").read_text())
    assert line["spectral_norm"] == pytest.approx({f"w{index:02}": index + 1.0 for index in range(30)})
    with pytest.raises(UsageError, match=r"weight_tracking.names has the pattern 'v\*', which matches none of the 30"):
        WeightTracking(names="v*").start(SimpleNamespace(model=model, output_dir=tmp_path, strategy="only"))


def test_frozen_parameters_are_omitted():
    model = nn.Linear(12, 12)
    model.weight.requires_grad_(False)
    assert set(measured(model)) == {"norm/bias", "total_norm"}


@pytest.mark.longer
@pytest.mark.parametrize(("rows", "columns"), [(8, 8), (64, 16), (32, 128), (64, 64)])
@pytest.mark.parametrize("kind", ["normal", "uniform", "signs"])
def test_random_matrices_stay_at_the_edge(kind, rows, columns):
    """Of 500 random matrices of any kind at most 2 % exceed 2.0, so the reading calls hardly any of them trained."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.rand(500, rows, columns, generator=generator, dtype=torch.float64) * 2 - 1
    if kind == "normal":
        drawn = torch.randn(500, rows, columns, generator=generator, dtype=torch.float64)
    values = torch.linalg.svdvals(drawn.sign() if kind == "signs" else drawn)
    excess = edge_excess(values * 3e-5, rows, columns)
    assert (excess > 2).double().mean() <= 0.02
    assert -2.2 < excess.mean() < -0.8
    planted_values = torch.linalg.svdvals(drawn[0] + 2)  # a direction of strength 2·√(rows·columns)
    assert edge_excess(planted_values, rows, columns) > 2


def test_edge_excess_follows_its_formula():
    values = np.linalg.svd(np.arange(24.0).reshape(4, 6) % 7, compute_uv=False)
    p, q = 4, 5
    edge = q**0.5 + p**0.5
    scale = edge * (1 / q**0.5 + 1 / p**0.5) ** (1 / 3)
    expected = (values[0] ** 2 / (values**2).sum() * 24 - edge**2) / scale
    assert edge_excess(torch.from_numpy(values), 6, 4).item() == pytest.approx(expected)


@pytest.mark.parametrize("shape", [(4, 6, 5), (2, 9, 9), (3, 2, 7)], ids=str)
def test_experts_are_measured_one_by_one(shape):
    """A parameter with a matrix per expert equals the experts in separate parameters."""
    stack = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    metrics = measured(model_with(experts=stack))
    alone = measured(nn.ParameterDict({f"e{number}": nn.Parameter(matrix) for number, matrix in enumerate(stack)}))
    for number in range(len(stack)):
        for column in ("spectral_norm", "effective_rank", "stable_rank", "edge_excess"):
            assert metrics[f"{column}/experts.{number}"] == alone[f"{column}/e{number}"]
    assert metrics["mean_stable_rank"] == alone["mean_stable_rank"]


@pytest.mark.parametrize(
    ("model", "names"),
    [
        (lambda: nn.Conv1d(4, 6, 3), ["weight"]),
        (lambda: nn.utils.parametrizations.weight_norm(nn.Conv1d(4, 6, 3)), ["parametrizations.weight.original1"]),
        (lambda: nn.ConvTranspose1d(4, 6, 3), ["weight"]),
        (lambda: model_with(positions=torch.randn(1, 5, 4)), ["positions"]),
        (lambda: model_with(cls_token=torch.randn(1, 1, 4)), []),
        (lambda: model_with(kernel=torch.randn(6, 4, 3, 3)), ["kernel"]),
    ],
    ids=["conv", "weight norm", "transposed", "positions", "token", "four dimensions"],
)
def test_other_tensors_are_one_matrix(model, names):
    metrics = measured(model())
    found = [name.partition("/")[2] for name in metrics if name.startswith("stable_rank/")]
    assert [name for name in found if "original0" not in name] == names
