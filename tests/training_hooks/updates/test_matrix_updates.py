"""The hook matrix_updates against singular value decompositions in float64, and against Newton-Schulz iterations."""

import math
from functools import partial

import loopscope
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loopscope.engine import HookManager
from loopscope.errors import UnsuitableError, UsageError
from loopscope.training_hooks.updates import MatrixUpdates
from loopscope.training_hooks.updates.matrix_updates import (
    cosine_of,
    singular_values_by_name,
    spectral_metrics,
    summaries,
)
from loopscope.training_hooks.updates.weight_matrices import WeightMatrix, spread, weight_matrices
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Muon

from tests.support import Case, run_info
from tests.support import build as build_run
from tests.support.ranks import on_ranks
from tests.training_hooks.ranks.shared_runs import trained
from tests.training_hooks.updates.architectures import ARCHITECTURES, Training, build, trainer_metrics

ALL = {"interval": 1, "names": "*"}
COUNTS = {"vit": 14, "llama": 15, "mixtral": 23, "resnet": 7, "lstm": 5}
"""The number of matrices of each architecture; each expert counts."""


def adamw(parameters) -> torch.optim.Optimizer:
    return AdamW(parameters, lr=1e-2)


def matrices(vector: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the matrices of tiny models by name: experts one by one, convolutions unfolded, no embeddings."""
    result = {}
    for name, value in vector.items():
        is_embedding = name.endswith(("embed_tokens.weight", "embedding.weight"))
        if value.ndim < 2 or is_embedding or min(value.shape[:2]) < 2:
            continue
        if value.ndim == 3:
            result |= {f"{name}.{index}": matrix for index, matrix in enumerate(value)}
        else:
            result[name] = value.flatten(1)
    return result


def expected_metrics(before, after, gradients, momenta) -> dict[str, float]:
    expected = {}
    for name, weight in before.items():
        change = after[name] - weight
        update, sigma = torch.linalg.svdvals(change), torch.linalg.svdvals(weight)
        shares = (update / update.sum()).tolist()
        scale = math.sqrt(weight.shape[0] / weight.shape[1])
        expected |= {
            f"update_norm/{name}": float(update[0]),
            f"update_stable_rank/{name}": float(change.square().sum() / update[0] ** 2),
            f"update_entropy/{name}": -math.fsum(p * math.log(p) for p in shares if p > 0) / math.log(len(shares)),
            f"relative_update/{name}": float(update[0] / sigma[0]),
            f"scaled_update/{name}": float(update[0]) / scale,
            f"scaled_weight/{name}": float(sigma[0]) / scale,
        }
        if name in momenta:
            norms = gradients[name].norm() * momenta[name].norm()
            expected[f"momentum_gradient_cosine/{name}"] = float((gradients[name] * momenta[name]).sum() / norms)
    families = {family: [v for k, v in expected.items() if k.startswith(f"{family}/")] for family in FAMILIES}
    expected["update_entropy_mean"] = math.fsum(families["update_entropy"]) / len(families["update_entropy"])
    expected["relative_update_max"] = max(families["relative_update"])
    expected["scaled_update_spread"] = max(families["scaled_update"]) / min(families["scaled_update"])
    return expected


FAMILIES = ("update_entropy", "relative_update", "scaled_update")


def check(training: Training, tolerance: float = 1e-4) -> None:
    """Compare every metric of every step with singular value decompositions."""
    for place in training.run():
        if place == "update":
            gradients, before = matrices(training.gradients()), matrices(training.weights())
        elif place == "end":
            named = training.model.named_parameters()
            states = {name: training.optimizer.state[parameter] for name, parameter in named}
            momenta = {
                name: state[key].double()
                for name, state in states.items()
                for key in ("exp_avg", "momentum_buffer")
                if key in state
            }
            used = {name: weight for name, weight in before.items() if name in gradients}
            expected = expected_metrics(used, matrices(training.weights()), gradients, matrices(momenta))
            assert training.metrics == pytest.approx(expected, rel=tolerance, abs=1e-6, nan_ok=True)


@pytest.mark.trainer
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architectures_match_brute_force(name, tmp_path):
    training = Training(tmp_path, name, "matrix_updates", adamw, options=ALL, steps=2)
    assert len(weight_matrices(training.model)) == COUNTS[name]
    check(training)


@pytest.mark.trainer
@pytest.mark.parametrize("checkpointing", [False, True], ids=["non-reentrant", "reentrant"])
def test_micro_batches_and_checkpointing_match_brute_force(checkpointing, tmp_path):
    settings = {"accumulate": 2, "checkpointing": checkpointing, "steps": 2}
    make = partial(SGD, lr=0.1, momentum=0.9)
    check(Training(tmp_path, "llama", "matrix_updates", make, options=ALL, **settings))


@pytest.mark.trainer
def test_momentum_in_a_trainer_starts_as_the_gradient(tmp_path):
    """After the first step of AdamW the momentum is a multiple of the gradient, and no element moves more than η."""
    frame, _ = trainer_metrics(tmp_path, "matrix_updates", ALL)
    first = frame.loc[1]
    cosines = first[[name for name in frame if name.startswith("momentum_gradient_cosine/")]]
    assert len(cosines) == COUNTS["llama"]
    assert cosines.tolist() == pytest.approx([1.0] * len(cosines), rel=1e-5)
    norms = first[[name for name in frame if name.startswith("update_norm/")]]
    assert 0 < norms.max() < 5e-5 * 16 * 1.01


def test_bfloat16_weights_match_brute_force(tmp_path):
    """The update is that of the rounded weights."""
    check(Training(tmp_path, "lstm", "matrix_updates", adamw, options=ALL, dtype=torch.bfloat16))


# Known spectra


def newton_schulz(values: Tensor) -> Tensor:
    """Apply the five iterations of Muon to singular values: σ ← 3.4445·σ − 4.775·σ³ + 2.0315·σ⁵."""
    values = values / values.norm()
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    return values


def with_spectrum(values: Tensor, out_features: int, in_features: int) -> Tensor:
    """Return a matrix with these singular values."""
    generator = torch.Generator().manual_seed(0)
    left, right = (
        torch.linalg.qr(torch.randn(size, len(values), generator=generator, dtype=torch.float64))[0]
        for size in (out_features, in_features)
    )
    return (left * values) @ right.T


def reported(folder, optimizer_class, gradient: Tensor, **options) -> dict[str, float]:
    """Take a step of a linear layer with a given gradient; return the hook's metrics."""
    model = nn.Linear(gradient.shape[1], gradient.shape[0], bias=False, dtype=gradient.dtype)
    optimizer = optimizer_class(model.parameters(), **options)
    with loopscope.attach(model, optimizer, hooks=["matrix_updates"], out=folder, display="none") as scope:
        for batch in scope.batches([gradient]):
            scope.backward((model.weight * batch).sum())
            optimizer.step()
            newest = scope.last_metrics().items()
            return {key.partition("/")[2]: float(value) for key, value in newest if key.startswith("matrix_updates/")}
    raise AssertionError


@pytest.mark.parametrize(("values", "tolerance"), [((1.0, 1.0, 1.0, 1.0), 0.12), ((4.0, 2.0, 1.0, 0.5), 0.15)])
def test_muon_has_the_spectrum_of_its_iterations(values, tolerance, tmp_path):
    """The singular values are those of Newton-Schulz, in bfloat16, times the learning rate and Muon's √(out/in)."""
    spectrum = torch.tensor(values, dtype=torch.float64)
    settings = {"lr": 0.1, "momentum": 0.0, "nesterov": False, "weight_decay": 0.0}
    metrics = reported(tmp_path, Muon, with_spectrum(spectrum, 12, 4).float(), **settings)
    sigma = newton_schulz(spectrum)
    shares = sigma / sigma.sum()
    expected = {
        "update_norm/weight": float(sigma.max()) * 0.1 * math.sqrt(12 / 4),
        "scaled_update/weight": float(sigma.max()) * 0.1,
        "update_stable_rank/weight": float((sigma**2).sum() / sigma.max() ** 2),
        "update_entropy/weight": float(-(shares * shares.log()).sum() / math.log(4)),
        "momentum_gradient_cosine/weight": 1.0,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=tolerance)


@pytest.mark.parametrize("beta", [0.5, 0.9])
def test_momentum_of_noise_has_the_documented_cosine(beta, tmp_path):
    """For independent gradients cos(m, g) is √(1−β₁²) in the limit, up to the noise of 3,600 elements."""
    model = nn.Linear(60, 60, bias=False)
    optimizer = AdamW(model.parameters(), lr=1e-4, betas=(beta, 0.99))
    noise = torch.randn(40, 60, 60, generator=torch.Generator().manual_seed(0))
    options = {"hook_options": {"matrix_updates": {"interval": 39}}, "out": tmp_path, "display": "none"}
    with loopscope.attach(model, optimizer, hooks=["matrix_updates"], **options) as scope:
        for gradient in scope.batches(noise):
            scope.backward((model.weight * gradient).sum())
            optimizer.step()
            optimizer.zero_grad()
    cosine = scope.last_metrics()["matrix_updates/momentum_gradient_cosine/weight"]
    assert float(cosine) == pytest.approx(math.sqrt(1 - beta**2), abs=0.05)


def test_gradient_descent_has_the_spectrum_of_the_gradient(tmp_path):
    values = torch.tensor([3.0, 1.0, 1.0], dtype=torch.float64)
    metrics = reported(tmp_path, SGD, with_spectrum(values, 3, 7), lr=0.5)
    shares = [0.6, 0.2, 0.2]
    assert metrics["update_norm/weight"] == pytest.approx(1.5)
    assert metrics["update_stable_rank/weight"] == pytest.approx(11 / 9)
    assert metrics["update_entropy/weight"] == pytest.approx(-sum(p * math.log(p) for p in shares) / math.log(3))
    assert "momentum_gradient_cosine/weight" not in metrics


@pytest.mark.parametrize("scale", [2.0**-120, 2.0**120])
def test_metrics_scale_with_the_update(scale):
    """Squares of float32 numbers neither over- nor underflow."""
    matrix = with_spectrum(torch.tensor([2.0, 1.0]), 4, 3).float()
    hook_values, scaled = (
        spectral_metrics(values, values, 4, 3)
        for values in (torch.linalg.svdvals(matrix.double()), torch.linalg.svdvals(matrix.double() * scale))
    )
    for name in ("update_stable_rank", "update_entropy", "relative_update"):
        assert scaled[name].item() == pytest.approx(hook_values[name].item())
    assert cosine_of(matrix * scale, matrix * scale).item() == pytest.approx(1)


@settings(max_examples=30)
@given(
    seed=st.integers(0, 2**31),
    shape=st.tuples(st.integers(2, 6), st.integers(2, 6)),
    rank=st.integers(1, 6),
    exponent=st.integers(-126, 120),
)
def test_metrics_stay_in_their_ranges(seed, shape, rank, exponent):
    """For updates of any rank and scale, equal singular values included."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.ones(min(rank, *shape), dtype=torch.float64)
    change = (with_spectrum(values, *shape) * 2.0**exponent).float()
    other = torch.randn(shape, generator=generator) * 2.0**-exponent
    spectra = singular_values_by_name({"change": change, "other": other})
    metrics = spectral_metrics(spectra["change"], spectra["other"], *shape)
    assert 1 <= metrics["update_stable_rank"] <= min(shape)
    assert 0 <= metrics["update_entropy"] <= 1
    assert all(metrics[name] > 0 for name in ("update_norm", "relative_update", "scaled_update", "scaled_weight"))
    assert -1 <= cosine_of(change, other) <= 1
    assert 0.9999 < cosine_of(change, change) <= 1


def test_unmoved_matrices_are_left_out_of_means(tmp_path):
    """A learning rate of 0 gives no direction: NaN, except for norms and ratios."""
    metrics = reported(tmp_path, SGD, torch.ones(3, 2), lr=0.0)
    assert metrics["update_norm/weight"] == metrics["relative_update/weight"] == 0
    assert all(math.isnan(metrics[name]) for name in ("update_stable_rank/weight", "update_entropy_mean"))
    assert math.isnan(metrics["scaled_update_spread"])


def test_unmoved_zero_matrices_hide_no_update():
    """The relative update of a zero matrix that does not move is 0/0; a NaN element remains visible."""
    moved = spectral_metrics(torch.tensor([2.0, 1.0]), torch.tensor([4.0, 1.0]), 2, 2)
    unmoved = spectral_metrics(torch.zeros(2), torch.zeros(2), 2, 2)
    broken = spectral_metrics(torch.full((2,), math.nan), torch.ones(2), 2, 2)
    for last, maximum, ratio in ((unmoved, 0.5, 1.0), (broken, math.nan, math.nan)):
        joined = summaries({family: {"moved": moved[family], "last": last[family]} for family in moved})
        assert joined["relative_update_max"].item() == pytest.approx(maximum, nan_ok=True)
        assert joined["scaled_update_spread"].item() == pytest.approx(ratio, nan_ok=True)


# Choice of matrices


class Experts(nn.Module):
    """Matrices of two experts, stored as (in, out)."""

    is_transposed = True

    def __init__(self) -> None:
        super().__init__()
        self.up, self.up_bias = nn.Parameter(torch.randn(2, 5, 8)), nn.Parameter(torch.randn(2, 8))


def test_matrices_have_the_orientation_of_their_layers():
    """Transposed convolutions and experts with ``is_transposed`` are stored as (in, out)."""
    model = nn.ModuleDict(
        {
            "linear": nn.Linear(5, 3),
            "convolution": nn.Conv1d(4, 6, 3),
            "transposed": nn.ConvTranspose2d(4, 6, 2),
            "embedding": nn.Embedding(7, 4),
            "bilinear": nn.Bilinear(2, 3, 4),
        }
    )
    model["experts"] = Experts()
    parameters = dict(model.named_parameters())
    shapes = {name: tuple(m.of(parameters[m.parameter]).shape) for name, m in weight_matrices(model).items()}
    assert shapes == {
        "linear.weight": (3, 5),
        "convolution.weight": (6, 12),
        "transposed.weight": (24, 4),
        "experts.up.0": (8, 5),
        "experts.up.1": (8, 5),
    }


def test_tied_embeddings_are_matrices_of_the_layer():
    model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 7, bias=False))
    model[1].weight = model[0].weight
    assert weight_matrices(model) == {"0.weight": WeightMatrix("0.weight")}


@pytest.mark.parametrize(("count", "names"), [(1, "u"), (2, "uw"), (3, "uvx"), (5, "uvwxy"), (9, "uvwxy")])
def test_sample_is_spread_over_the_model(count, names):
    assert spread(dict.fromkeys("uvwxy", WeightMatrix("m")), count) == list(names)


@pytest.mark.trainer
def test_sample_and_names_are_measured(tmp_path):
    options = {"interval": 1, "matrices": 2, "names": "*experts.down_proj.1"}
    training = Training(tmp_path, "mixtral", "matrix_updates", adamw, options=options, steps=1)
    assert list(training.run())[-1] == "end"
    named = [name.partition("/")[2] for name in training.metrics if name.startswith("update_norm/")]
    assert len(named) == 4
    assert len([name for name in named if name.endswith("experts.down_proj.1")]) == 2


def test_unsuitable_models_and_options_are_refused():
    with pytest.raises(UsageError, match=r"matrix_updates\.matrices is 0; it must be at least 1\."):
        MatrixUpdates(matrices=0)
    task, state = build_run(Case())
    hook = MatrixUpdates()
    info = run_info(task, HookManager([hook], task, state), "epoch")
    task.model.requires_grad_(False)
    with pytest.raises(UnsuitableError, match="needs trainable matrices of linear layers, convolutions or experts"):
        hook.start(info)


@pytest.mark.trainer
def test_every_expert_is_one_matrix():
    names = [name for name in weight_matrices(build("mixtral")) if ".gate_up_proj." in name]
    assert [name.rpartition(".")[2] for name in names] == ["0", "1", "2"] * 2


# Ranks


def _trained(kind: str) -> dict[str, float]:
    metrics = trained(kind, [MatrixUpdates(**ALL)], tied=False, recipe=None)["metrics"]
    return {f"{name} at step {step}": float(v) for (name, _, step), v in metrics.items() if "matrix_updates" in name}


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["DDP", "FSDP2", "TP"])
def test_three_ranks_match_one_process(kind, tmp_path):
    expected = _trained("one process")
    assert len(expected) > 100
    for rank in on_ranks(partial(_trained, kind), tmp_path, 3):
        assert rank == pytest.approx(expected, rel=1e-6, abs=1e-9, nan_ok=True)
