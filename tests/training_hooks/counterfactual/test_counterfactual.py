import math
from collections.abc import Callable
from itertools import combinations, count

import pytest
import torch
from loopscope.data import TensorLoader, fixed_order, random_order
from loopscope.engine import HookManager
from loopscope.errors import RunNotice, UsageError
from loopscope.hooks import HookPoint
from loopscope.loops import epoch_loop
from loopscope.state import RandomStreams, TrainingState, seed_everything
from loopscope.tensors import copied
from loopscope.training import TrainingTask
from loopscope.training_hooks.counterfactual import Counterfactual, CounterfactualValidator
from loopscope.training_hooks.counterfactual.counterfactual import (
    inner_products,
    ordering_split,
    solution_alignment,
    split_errors,
)
from scipy import stats
from torch import Tensor, nn
from torch.nn import functional

from tests.support import STEPS_PER_EPOCH, Case, RecordingSink, SpyHook, assert_same_bytes, at, build, mean_loss, train


def split_of(vectors: Tensor) -> dict[str, Tensor]:
    """Split the first row of a matrix against the others."""
    return ordering_split(vectors @ vectors.T)


def outside(one: Tensor, mean: Tensor) -> Tensor:
    return 1 - torch.cosine_similarity(one, mean, dim=0).clamp(min=0) ** 2


def null_of(shuffles: Tensor) -> Tensor:
    return split_of(torch.cat([shuffles[:1], shuffles]))["null_fraction"]


def excess_of(one: Tensor, shuffles: Tensor) -> Tensor:
    """Return the excess from its definition on vectors."""
    others = [torch.cat([shuffles[:i], shuffles[i + 1 :]]).mean(dim=0) for i in range(len(shuffles))]
    matched = torch.stack([outside(one, other) for other in others]).mean()
    return matched - torch.stack([outside(c, other) for c, other in zip(shuffles, others, strict=True)]).mean()


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("k", [2, 3, 5])
def test_split_projects_onto_mean_of_shuffles(k, sign):
    """Every metric of the split matches its definition on explicit vectors."""
    vectors = torch.randn(k + 1, 20, generator=torch.Generator().manual_seed(k), dtype=torch.float64) + 0.5
    vectors[0] *= sign
    g, shuffles, found = vectors[0], vectors[1:], split_of(vectors)
    mean = shuffles.mean(dim=0)
    content = (g @ mean) / (mean @ mean) * mean
    others = [torch.cat([shuffles[:i], shuffles[i + 1 :]]).mean(dim=0) for i in range(k)]
    matched = torch.stack([outside(g, other) for other in others]).mean()
    null = torch.stack([outside(c, other) for c, other in zip(shuffles, others, strict=True)]).mean()
    pairs = [torch.cosine_similarity(shuffles[i], shuffles[j], dim=0) for i in range(k) for j in range(i)]
    expected = {
        "ordering_fraction": outside(g, mean),
        "ordering_fraction_matched": matched,
        "null_fraction": null,
        "excess": matched - null,
        "content_norm": content.norm(),
        "ordering_norm": (g - content).norm(),
        "content_cosine": torch.cosine_similarity(g, mean, dim=0),
        "observed_coherence": torch.cosine_similarity(shuffles, g.expand_as(shuffles)).mean(),
        "shuffle_coherence": torch.stack(pairs).mean(),
        "observed_norm": g.norm(),
        "shuffled_norm": shuffles.norm(dim=1).mean(),
    }
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.parametrize("k", [2, 3, 5])
@pytest.mark.parametrize("sign", [1, -1])
def test_alignment_matches_parts_and_solution_direction(k, sign):
    """Every cosine matches its definition on explicit vectors."""
    vectors = torch.randn(k + 2, 20, generator=torch.Generator().manual_seed(k), dtype=torch.float64) + 0.5
    vectors[0] *= sign
    g, shuffles, way, found = vectors[0], vectors[1:-1], vectors[-1], solution_alignment(vectors @ vectors.T)
    mean = shuffles.mean(dim=0)
    content = (g @ mean) / (mean @ mean) * mean
    alone = [torch.cosine_similarity(-shuffle, way, dim=0) for shuffle in shuffles]
    expected = {
        "solution_cosine": torch.cosine_similarity(-g, way, dim=0),
        "content_solution_cosine": torch.cosine_similarity(-content, way, dim=0),
        "ordering_solution_cosine": torch.cosine_similarity(content - g, way, dim=0),
        "shuffled_solution_cosine": torch.stack(alone).mean(),
        "solution_excess": torch.cosine_similarity(-g, way, dim=0) - torch.stack(alone).mean(),
    }
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-12, msg=name)


def test_opposed_epoch_is_pure_ordering():
    """A gradient opposite to its content has a fraction of 1 and a negative coherence."""
    generator = torch.Generator().manual_seed(0)
    shuffles = torch.randn(4, 50, generator=generator, dtype=torch.float64) * 0.1 + 1
    found = split_of(torch.cat([-shuffles.mean(dim=0, keepdim=True), shuffles]))
    assert found["ordering_fraction"] == found["ordering_fraction_matched"] == 1
    assert found["excess"] == 1 - found["null_fraction"]
    assert found["content_cosine"].item() == pytest.approx(-1)
    assert found["observed_coherence"] < -0.9


def test_described_metrics_equal_reported_metrics():
    gram = torch.eye(5)
    names = {*ordering_split(gram[:-1, :-1]), *split_errors(gram[:-1, :-1]), *solution_alignment(gram)}
    assert names == {info.name for info in Counterfactual().describe_metrics()}


def test_alignment_without_ordering_is_nan():
    """Rounding noise is not reported as a direction."""
    g = torch.randn(500, generator=torch.Generator().manual_seed(0))
    way = torch.randn(500, generator=torch.Generator().manual_seed(1))
    vectors = torch.stack([g, 2 * g, 0.5 * g, way])
    found = solution_alignment(vectors @ vectors.T)
    assert found["ordering_solution_cosine"].isnan()
    torch.testing.assert_close(found["content_solution_cosine"], torch.cosine_similarity(-g, way, dim=0))


@pytest.mark.longer
def test_solution_excess_detects_planted_order_effect():
    """A random order has no significant excess over 300 draws."""
    generator = torch.Generator().manual_seed(0)
    found: dict[float, list[Tensor]] = {0.0: [], 0.5: []}
    for planted, excesses_of in found.items():
        for _ in range(300):
            vectors = torch.randn(5, 30, generator=generator, dtype=torch.float64)
            vectors[0] -= planted * vectors[-1]
            excesses_of.append(solution_alignment(vectors @ vectors.T)["solution_excess"])
    assert abs(deviation(torch.stack(found[0.0]))) < 3
    assert deviation(torch.stack(found[0.5])) > 10


def test_solution_direction_starts_at_epoch_start():
    """The cosine is 1 for a reference exactly ahead of the weights at the start of the epoch."""
    case = Case("tied", "sgd_momentum")
    start = {name: value.detach() for name, value in build(case)[0].model.named_parameters()}
    after: dict[str, Tensor] = {}
    spy = at(SpyHook, HookPoint.POST_EPOCH, needs_grads=True)
    train(case, [spy(lambda ctx: after.update(copied(ctx.accumulated_grads)))])
    ahead = {name: value - 3 * after[name] for name, value in start.items()}
    sink = train(case, [Counterfactual()], reference_weights=ahead).sink
    assert sink.rows("counterfactual/solution_cosine")[0][3] == pytest.approx(1.0)
    (content,) = [row[3] for row in sink.rows("counterfactual/content_cosine")]
    (found,) = [row[3] for row in sink.rows("counterfactual/content_solution_cosine")]
    assert found == pytest.approx(abs(content), rel=1e-5)


def test_inner_products_match_flat_vectors():
    vectors = [{"a": torch.randn(3, 2), "b": torch.randn(4)} for _ in range(4)]
    flat = torch.stack([torch.cat([value.flatten() for value in vector.values()]) for vector in vectors])
    torch.testing.assert_close(inner_products(vectors), (flat @ flat.T).double(), rtol=1e-5, atol=1e-5)


def simulate(k: int, size: int, noise_energy: float, order_energy: float, trials: int) -> dict[str, Tensor]:
    """Draw epochs that share a signal of energy 1, each with separate noise, and the observed one with an effect."""
    generator = torch.Generator().manual_seed(0)
    found: dict[str, list[Tensor]] = {}
    for _ in range(trials):
        vectors = torch.randn(k + 1, size, generator=generator, dtype=torch.float64) * math.sqrt(noise_energy / size)
        vectors[:, 0] += 1
        vectors[0, 1] += math.sqrt(order_energy)
        for name, value in split_of(vectors).items():
            found.setdefault(name, []).append(value)
    return {name: torch.stack(values) for name, values in found.items()}


def deviation(values: Tensor) -> float:
    """Return the mean in units of its standard error."""
    return (values.mean() / (values.std() / math.sqrt(len(values)))).item()


@pytest.mark.longer
def test_pure_noise_matches_formula_without_excess():
    """Both fractions match their formulas over 400 trials."""
    found = simulate(k=3, size=3000, noise_energy=3.0, order_energy=0.0, trials=400)
    assert found["ordering_fraction"].mean().item() == pytest.approx(0.875, abs=0.003)
    assert found["null_fraction"].mean().item() == pytest.approx(0.9, abs=0.003)
    assert abs(deviation(found["excess"])) < 3
    assert deviation(found["ordering_fraction"] - found["null_fraction"]) < -10


@pytest.mark.parametrize("k", [2, 3, 5])
@pytest.mark.parametrize("noise_energy", [0.1, 10.0])
@pytest.mark.statistical
def test_excess_is_unbiased_in_few_dimensions(k, noise_energy):
    """This holds for few shuffles and for weak and strong noise."""
    found = simulate(k, size=5, noise_energy=noise_energy, order_energy=0.0, trials=400)
    assert abs(deviation(found["excess"])) < 3


@pytest.mark.longer
def test_planted_order_effect_matches_formula():
    """The mean excess of the simulation equals the closed form."""
    r, q, k = 1.0, 2.0, 4
    found = simulate(k, size=3000, noise_energy=r, order_energy=q, trials=300)["excess"]
    expected = (1 / (1 + r) - 1 / (1 + r + q)) / (1 + r / (k - 1))
    assert found.mean().item() == pytest.approx(expected, abs=0.01)
    assert deviation(found) > 30


def jackknife(of: Callable[[Tensor], Tensor], shuffles: Tensor) -> Tensor:
    """Return the squared standard error of ``of(shuffles)``, one shuffle left out at a time."""
    left = torch.stack([of(torch.cat([shuffles[:i], shuffles[i + 1 :]])) for i in range(len(shuffles))])
    return (left - left.mean()).square().sum() * (len(shuffles) - 1) / len(shuffles)


def chance_of(g: Tensor, shuffles: Tensor) -> Tensor:
    """Return the variance of 1 − cos²(g, m) due to chance in g, by derivatives along differences of shuffles."""
    derivatives = []
    for i, j in combinations(range(len(shuffles)), 2):
        mean = torch.stack([c for k, c in enumerate(shuffles) if k not in (i, j)]).mean(dim=0)
        step = (shuffles[i] - shuffles[j]) / math.sqrt(2)
        derivatives.append((outside(g + 1e-6 * step, mean) - outside(g - 1e-6 * step, mean)) / 2e-6)
    return torch.stack(derivatives).square().mean()


@pytest.mark.parametrize("k", [3, 4, 6])
@pytest.mark.parametrize("effect", [0.0, 3.0, 12.0])
def test_errors_match_definitions_on_vectors(k, effect):
    """Errors and half-widths match a jackknife with placebo epochs on explicit vectors."""
    vectors = torch.randn(k + 1, 20, generator=torch.Generator().manual_seed(k), dtype=torch.float64) * 0.4 + 0.5
    vectors[0, :10] += effect
    g, shuffles, found = vectors[0], vectors[1:], split_errors(vectors @ vectors.T)
    excess = excess_of(g, shuffles)
    of_excess = jackknife(lambda some: excess_of(g, some), shuffles)
    placebos = [excess_of(shuffles[i], torch.cat([shuffles[:i], shuffles[i + 1 :]])) for i in range(k)]
    chance = torch.maximum(of_excess, torch.stack(placebos).square().mean() * (1 - 1 / k**2))
    quantile = stats.t.ppf(0.975, k - 1)
    if excess.abs() > quantile * chance.sqrt():
        chance = torch.maximum(chance, of_excess + chance_of(g, shuffles))
    expected = {
        "ordering_fraction_error": jackknife(lambda some: outside(g, some.mean(dim=0)), shuffles).sqrt(),
        "null_fraction_error": jackknife(null_of, shuffles).sqrt(),
        "excess_error": chance.sqrt(),
        "excess_half_width": quantile * chance.sqrt(),
    }
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-9, msg=name)


@pytest.mark.longer
@pytest.mark.parametrize("spread", [0.0, 1e-9, 1e-7, 1e-5])
def test_equal_epochs_stay_in_declared_ranges(spread):
    """Epochs of one full batch have equal gradients, whose cosines rounding may take beyond 1."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(12):
        base = torch.randn(50, generator=generator)
        gram = inner_products([{"w": base + spread * torch.randn(50, generator=generator)} for _ in range(5)])
        found = ordering_split(gram[:4, :4]) | split_errors(gram[:4, :4]) | solution_alignment(gram)
        assert all(0 <= found[name] <= 1 for name in found if name.endswith(("fraction", "matched")))
        assert all(abs(found[name]) <= 1 for name in found if name.endswith(("_cosine", "coherence", "excess"))
                   if not found[name].isnan())  # fmt: skip
        by_count = CounterfactualValidator(k_max=4).estimate(gram)
        assert all(
            0 <= value <= 1 for name in ("ordering_fraction", "null_fraction") for value in by_count[name].values()
        )


def covered(k: int, size: int, noise: float, effect: float, trials: int) -> tuple[float, float]:
    """Return the coverage of the 95 % interval, and the ratio of stated to observed mean square error."""
    generator = torch.Generator().manual_seed(1)
    vectors = torch.randn(trials, k + 1, size, generator=generator, dtype=torch.float64) * math.sqrt(noise / size)
    vectors[:, :, 0] += 1
    vectors[:, 0, 1] += math.sqrt(effect)
    grams = vectors @ vectors.transpose(1, 2)
    found = torch.stack([ordering_split(gram)["excess"] for gram in grams])
    errors = [split_errors(gram) for gram in grams]
    widths, error = (torch.stack([error[name] for error in errors]) for name in ("excess_half_width", "excess_error"))
    truth = found.mean() if effect else 0.0
    share = ((found - truth).abs() <= widths).double().mean().item()
    return share, (error.square().mean() / found.var()).item()


@pytest.mark.parametrize(("k", "noise", "effect"), [(5, 1.0, 0.0), (3, 10.0, 0.0), (5, 0.1, 0.5)])
@pytest.mark.statistical
def test_excess_interval_covers_the_expectation(k, noise, effect):
    """At least 93% of the 95% intervals cover it, and the reported error is realistic."""
    share, ratio = covered(k, 30, noise, effect, trials=300)
    assert share >= 0.93
    assert 0.8 <= ratio <= 1.7


@pytest.mark.slow
@pytest.mark.parametrize("k", [3, 5])
@pytest.mark.parametrize("noise", [0.1, 1.0, 10.0])
@pytest.mark.parametrize("effect", [0.0, 0.5])
def test_excess_interval_is_conservative(k, noise, effect):
    share, ratio = covered(k, 30, noise, effect, trials=2000)
    assert share >= 0.94
    assert 0.75 <= ratio <= 2


def power(k: int, noise: float, size: int, trials: int, excess: float = 0.2) -> float:
    """Return how often a true excess is beyond its half-width in one epoch."""
    effect = 1 / (1 / (1 + noise) - excess * (1 + noise / (k - 1))) - 1 - noise
    generator = torch.Generator().manual_seed(1)
    vectors = torch.randn(trials, k + 1, size, generator=generator, dtype=torch.float64) * math.sqrt(noise / size)
    vectors[:, :, 0] += 1
    vectors[:, 0, 1] += math.sqrt(effect)
    grams = vectors @ vectors.transpose(1, 2)
    hits = [ordering_split(gram)["excess"] > split_errors(gram)["excess_half_width"] for gram in grams]
    return float(torch.stack(hits).double().mean())


@pytest.mark.statistical
@pytest.mark.parametrize(
    ("k", "few", "many"),
    [(3, (0.07, 0.15), (0.66, 0.85)), (5, (0.15, 0.4), (0.94, 1.0)), (8, (0.22, 0.55), (0.97, 1.0))],
)
@pytest.mark.parametrize("noise", [0.3, 1.0])
def test_power_is_as_documented(k, few, many, noise):
    """The share of epochs in which an excess of 0.2 is found, in 30 and in 300 dimensions."""
    assert few[0] <= power(k, noise, 30, 300) <= few[1]
    assert many[0] <= power(k, noise, 300, 300) <= many[1]


def test_default_finds_few_effects_and_reports_it():
    """Five shuffles find more than three, and need no notice."""
    assert power(3, 1.0, 300, 60) < power(5, 1.0, 300, 60)
    with pytest.warns(RunNotice, match=r"counterfactual\.k is 3, .* choose 5 or more .*'counterfactual': {'k': 5}"):
        train(Case("tied", "sgd_momentum"), [Counterfactual()])


def test_two_shuffles_give_notice_instead_of_errors():
    """The notice names the option and the minimum of three shuffles."""
    assert split_errors(torch.eye(3)) == {}
    with pytest.warns(
        RunNotice, match=r"counterfactual\.k is 2; .* need at least 3 shuffles .*'counterfactual': {'k': 3}"
    ):
        run = train(Case("tied", "sgd_momentum"), [Counterfactual(k=2)])
    names = {name for name, *_ in run.sink.rows("counterfactual/")}
    assert "counterfactual/excess" in names
    assert not any(name.endswith(("_error", "_half_width")) for name in names)


@pytest.mark.longer
@pytest.mark.some_rows(2)
@pytest.mark.parametrize("noise_energy", [1.0, 10.0])
def test_clamped_excess_is_unbiased(noise_energy):
    """Negative content cosines occur in two dimensions, and the mean excess is still zero."""
    found = simulate(3, size=2, noise_energy=noise_energy, order_energy=0.0, trials=600)
    assert (found["content_cosine"] < 0).double().mean() > 0.02
    assert abs(deviation(found["excess"])) < 3


def excesses(order: str, *, batch_size: int = 8, epochs: int = 50) -> Tensor:
    """Train a noisy classifier for some epochs and return the excess of each."""
    seed_everything(1)
    inputs = torch.randn(48, 5)
    targets = (inputs[:, 0] + 0.5 * torch.randn(48) > 0).long()
    orders = {"random": random_order(48, 9), "sorted": fixed_order(inputs[:, 0].argsort())}
    model = nn.Sequential(nn.Linear(5, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.5)
    loader = TensorLoader((inputs, targets), batch_size, orders[order])
    task = TrainingTask(model, optimizer, loader, mean_loss, length=epochs)
    sink, state = RecordingSink(), TrainingState(model, optimizer, RandomStreams(3))
    epoch_loop(task, HookManager([Counterfactual()], task, state, sinks=[sink]))
    return torch.tensor([row[3] for row in sink.rows() if row[0] == "counterfactual/excess"], dtype=torch.float64)


@pytest.mark.statistical
def test_sorted_training_has_excess_random_none():
    """A noisy classifier is trained for 50 epochs in each order."""
    random, ordered = excesses("random"), excesses("sorted")
    assert len(random) == len(ordered) == 50
    assert abs(deviation(random)) < 3
    assert deviation(ordered) > 5


def test_epoch_of_one_batch_has_no_ordering():
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    loader = TensorLoader((torch.randn(12, 4), torch.randint(3, (12,))), 12, random_order(12, 1))
    task = TrainingTask(model, optimizer, loader, mean_loss, length=2)
    sink = RecordingSink()
    manager = HookManager([Counterfactual()], task, TrainingState(model, optimizer, RandomStreams(3)), sinks=[sink])
    epoch_loop(task, manager)
    for name in ("ordering_fraction", "ordering_fraction_matched", "null_fraction", "excess"):
        found = [row[3] for row in sink.rows() if row[0] == f"counterfactual/{name}"]
        assert found == pytest.approx([0.0, 0.0], abs=1e-6)


@pytest.mark.parametrize("k", [2, 4])
def test_measurement_costs_exactly_k_epochs(k):
    """Each measured epoch computes k further epochs of losses."""
    calls = count()

    def counting_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        next(calls)
        return functional.cross_entropy(model(batch[0]), batch[1])

    task, state = build(Case("tied", "sgd_momentum"), steps=2 * STEPS_PER_EPOCH)
    task.compute_loss = counting_loss
    epoch_loop(task, HookManager([Counterfactual(k=k)], task, state))
    assert next(calls) == 2 * (1 + k) * STEPS_PER_EPOCH


@pytest.mark.slow
def test_hook_measures_early_epochs_then_snapshots():
    """Each of the first 50 epochs is measured, then every snapshot, also that of an early stop."""
    case = Case("tied", "sgd_momentum")
    stops = count()
    run = train(
        case,
        [Counterfactual(k=2)],
        steps=80 * STEPS_PER_EPOCH,
        audit=False,
        snapshot_every=5,
        evaluate=lambda model: {"epoch": float(next(stops))},
        should_stop=lambda evaluation: evaluation["epoch"] == 57,
    )
    calls = [
        (point, step // STEPS_PER_EPOCH - 1) for _, point, step, _ in run.sink.rows("counterfactual/observed_norm")
    ]
    expected = [(HookPoint.POST_EPOCH, epoch) for epoch in range(50)]
    expected += [(HookPoint.SNAPSHOT, epoch) for epoch in (54, 57)]
    assert sorted(calls) == sorted(expected)


@pytest.mark.longer
def test_hook_preserves_run_and_skips_step_loop():
    case = Case("batchnorm_mlp", "adamw_fused")
    run = train(case, [Counterfactual()], steps=6)
    assert_same_bytes(run, case, 6)
    assert len(run.sink.rows("counterfactual/observed_norm")) == len(run.sink.rows("counterfactual/excess_error")) == 2
    train(Case("tied", loop="step"), [Counterfactual()], raises=UsageError)


def test_single_shuffle_is_refused():
    """The null distribution needs at least two shuffles."""
    with pytest.raises(UsageError, match=r"counterfactual\.k is 1; it must be at least 2"):
        Counterfactual(k=1)
