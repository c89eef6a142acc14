"""The gradient noise scale against closed forms, exhaustive averages and gradients of single rows."""

import io
import itertools
import math
import warnings

import pytest
import torch
from loopscope.data import TensorLoader, fixed_order, random_order
from loopscope.engine import HookManager
from loopscope.errors import RunNotice, UsageError
from loopscope.loops import step_loop
from loopscope.state import RandomStreams, TrainingState
from loopscope.state.digest import described
from loopscope.training import TrainingTask
from loopscope.training_hooks.gradients import GradientNoiseScale
from loopscope.training_hooks.gradients.gradient_noise_scale import (
    part_norms,
    signal_and_noise,
    standard_errors,
    strongest_correlation,
)
from torch import Tensor, nn

from tests.support import BATCH, Case, RecordingSink, run_info, train


def estimates(gradients: Tensor, sizes: list[int]) -> tuple[float, float]:
    """Return signal and noise from row gradients, shape (rows, dimensions), split into parts of these sizes."""
    means = [{"w": part.mean(dim=0)} for part in gradients.split(sizes)]
    signal, noise = signal_and_noise(part_norms(means, sizes), sum(sizes) / len(sizes), sum(sizes))
    return signal.item(), noise.item()


def regression_gradients(count: int, error: Tensor, label_noise: float) -> Tensor:
    """Draw gradients of ½(w·x − y)² with x ~ N(0, I), y = w*·x + N(0, label_noise²), error = w − w*."""
    x = torch.randn(count, len(error), dtype=torch.float64)
    return (x @ error - label_noise * torch.randn(count, dtype=torch.float64))[:, None] * x


@pytest.mark.parametrize("sizes", [[8, 8], [8, 5, 3], [3, 13], [4] * 4])
@pytest.mark.statistical
def test_linear_regression_matches_known_signal_and_noise(sizes):
    """The means are within four standard errors."""
    torch.manual_seed(len(sizes))
    error, label_noise = torch.tensor([0.5, -1.0, 0.3], dtype=torch.float64), 0.7
    energy = error.square().sum().item()
    true_values = (energy, 3 * (energy + label_noise**2) + energy)
    draws = [estimates(regression_gradients(16, error, label_noise), sizes) for _ in range(2000)]
    for values, expected in zip(zip(*draws, strict=True), true_values, strict=True):
        scatter = torch.tensor(values, dtype=torch.float64)
        standard_error = scatter.std() / math.sqrt(len(scatter))
        assert abs(scatter.mean() - expected) < 4 * standard_error < 0.2 * expected


@pytest.mark.longer
@pytest.mark.some_rows(2)
@pytest.mark.parametrize("sizes", [[2, 2], [3, 1], [2, 1, 1], [3, 3]])
def test_means_over_all_row_orders_are_exact(sizes):
    gradients = torch.randn(6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    orders = list(itertools.permutations(range(6), sum(sizes)))
    means = torch.tensor([estimates(gradients[list(order)], sizes) for order in orders], dtype=torch.float64).mean(0)
    noise = gradients.var(dim=0).sum()
    assert means[1] == pytest.approx(noise.item(), rel=1e-9)
    assert means[0] == pytest.approx((gradients.mean(0).square().sum() - noise / 6).item(), rel=1e-9)


def test_equal_gradients_have_no_noise():
    """Opposite gradients have no signal."""
    agreeing = torch.tensor([[3.0, 4.0]], dtype=torch.float64).repeat(4, 1)
    assert estimates(agreeing, [2, 2]) == (25, 0)
    assert estimates(agreeing * torch.tensor([[1.0], [1.0], [-1.0], [-1.0]]), [2, 2]) == (-25, 100)


def square_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (model(batch[0])[:, 0] - batch[1]).square().mean() / 2


def regression_task(batch_size: int, *, lr: float = 0.05, **settings: int) -> TrainingTask:
    """Make a float64 regression on 22 rows."""
    torch.manual_seed(4)
    model = nn.Linear(3, 1, bias=False).double()
    data = (torch.randn(22, 3, dtype=torch.float64), torch.randn(22, dtype=torch.float64))
    loader = TensorLoader(data, batch_size, fixed_order(torch.arange(22)))
    return TrainingTask(model, torch.optim.SGD(model.parameters(), lr=lr), loader, square_loss, **settings)


def measured(task: TrainingTask, hook: GradientNoiseScale, start: dict[str, int] | None = None) -> list[dict]:
    """Run the step loop; return the hook's reports, a dict with the step for each visit."""
    state, sink, rows = TrainingState(task.model, task.optimizer, RandomStreams(7)), RecordingSink(), {}
    vars(state.loop).update(start or {})
    step_loop(task, HookManager([hook], task, state, loop="step", sinks=[sink], audit=True))
    for name, _, step, value in sink.rows("gradient_noise_scale"):
        rows.setdefault(step, {"step": step})[name.removeprefix("gradient_noise_scale/")] = value
    return list(rows.values())


@pytest.mark.parametrize(("parts", "sizes"), [(2, [[5, 5], [5, 5], [1, 1]]), (3, [[4, 4, 2], [4, 4, 2], [1, 1]])])
def test_estimates_match_row_gradients_in_a_run(parts, sizes):
    task = regression_task(10, lr=0.0, length=3)
    reports = measured(task, GradientNoiseScale(every_n_steps=1, parts=parts, decay=0.0))
    weight = task.model.weight.detach()[0]
    for report, (x, y), split in zip(reports, task.loader.batches(0), sizes, strict=True):
        signal, noise = estimates((x @ weight - y)[:, None] * x, split)
        expected = {"signal": signal, "noise": noise, "noise_scale": noise / signal, "batch_rows": sum(split)}
        expected |= {"signal_estimate": signal, "noise_estimate": noise, "step": report["step"]}
        assert report == pytest.approx(expected, rel=1e-9)


def brute_force_errors(weights: Tensor, signals: Tensor, noises: Tensor) -> dict[str, float]:
    """Compute the standard errors from the definition, with normalised weights and residuals of the weighted means."""
    shares = weights / weights.sum()
    signal, noise = shares @ signals, shares @ noises
    square, cube = shares.square().sum(), shares.pow(3).sum()
    unbiased = square / (square - 2 * cube + square**2)
    error = lambda residuals: float(((shares * residuals).square().sum() * unbiased).sqrt())
    return {
        "signal_error": error(signals - signal),
        "noise_error": error(noises - noise),
        "noise_scale_error": error(noises - noise / signal * signals) / abs(float(signal)),
    }


@pytest.mark.longer
@pytest.mark.parametrize("decay", [0.5, 0.9, 1.0])
def test_errors_match_the_formula_from_second_measurement(decay):
    reports = measured(regression_task(6, length=12), GradientNoiseScale(every_n_steps=2, decay=decay))
    assert not [name for name in reports[0] if name.endswith("_error")]
    for count, report in enumerate(reports[1:], start=2):
        values = torch.tensor(
            [[row["signal_estimate"], row["noise_estimate"]] for row in reports[:count]], dtype=torch.float64
        )
        weights = decay ** torch.arange(count - 1, -1, -1, dtype=torch.float64)
        expected = brute_force_errors(weights, *values.T)
        assert {name: report[name] for name in expected} == pytest.approx(expected, rel=1e-6)


def simulated(trials: int, count: int, decay: float, *, heavy: bool = False) -> tuple[Tensor, Tensor]:
    """Return deviations of averages from the truth |G|² = 1, S = 20, and their standard errors; parts have 16 rows.

    Heavy-tailed rows have Student's t distribution with 3 degrees of freedom.
    """
    generator = torch.Generator().manual_seed(trials)
    dimensions, rows, energy = 50, 16, 20.0
    parts = torch.randn(trials, count, 2, dimensions, dtype=torch.float64, generator=generator)
    if heavy:
        drawn = torch.randn(trials, count, 2, rows, dimensions + 3, dtype=torch.float64, generator=generator)
        sizes = drawn[..., dimensions:].square().sum(-1, keepdim=True).sqrt()
        parts = (drawn[..., :dimensions] / sizes).mean(3) * math.sqrt(rows)
    parts = parts * math.sqrt(energy / dimensions / rows) + torch.eye(dimensions, dtype=torch.float64)[0]
    norms = parts.square().sum(-1).mean(-1), parts.mean(-2).square().sum(-1)
    measurements = torch.stack([torch.ones_like(norms[0]), *signal_and_noise(norms, rows, 2 * rows)], dim=-1)
    weights = decay ** torch.arange(count - 1, -1, -1, dtype=torch.float64)
    cubes = weights.pow(3).sum().item()
    results = []
    for trial in measurements:
        sums, moments = weights @ trial, trial.T @ (weights.square()[:, None] * trial)
        errors = torch.stack(list(standard_errors(sums, moments, cubes).values()))
        averages = torch.stack([sums[1] / sums[0], sums[2] / sums[0], sums[2] / sums[1]])
        results.append((averages - torch.tensor([1.0, energy, energy]), errors))
    return torch.stack([deviation for deviation, _ in results]), torch.stack([errors for _, errors in results])


@pytest.mark.longer
@pytest.mark.parametrize(
    ("trials", "within", "coverage"),
    [(300, 0.15, (0.90, 0.98)), pytest.param(2000, 0.06, (0.93, 0.97), marks=pytest.mark.slow)],
)
def test_errors_match_scatter_and_cover_truth(trials, within, coverage):
    """Two standard errors cover the truth at about 95 %."""
    deviations, errors = simulated(trials, 30, 1.0)
    assert (errors.square().mean(0).sqrt() / deviations.std(0)).tolist() == pytest.approx([1, 1, 1], abs=within)
    assert (deviations.mean(0).abs() < 4 * errors.mean(0) / math.sqrt(trials) + errors.mean(0) * 0.1).all()
    for share in (deviations.abs() <= 2 * errors).double().mean(0).tolist():
        assert coverage[0] <= share <= coverage[1]


def test_heavy_tails_are_covered_less_often_as_documented():
    """Two standard errors cover noise in about 80 %, and its ratio to the signal in about 85 %."""
    deviations, errors = simulated(300, 30, 1.0, heavy=True)
    signal, noise, ratio = (deviations.abs() <= 2 * errors).double().mean(0).tolist()
    assert signal > 0.9
    assert 0.72 <= noise <= 0.87
    assert 0.78 <= ratio <= 0.91


@pytest.mark.longer
def test_unequally_weighted_errors_are_unbiased():
    """Two standard errors cover the truth slightly less often."""
    deviations, errors = simulated(500, 60, 0.9)
    assert (errors.square().mean(0).sqrt() / deviations.std(0)).tolist() == pytest.approx([1, 1, 1], abs=0.12)
    assert ((deviations.abs() <= 2 * errors).double().mean(0) > 0.88).all()


def notices(
    hook: GradientNoiseScale, order: Tensor | None, length: int = 400, loader: TensorLoader | None = None
) -> list[str]:
    """Return the hook's notices at the start of a run on rows with their indices as targets."""
    order_of = random_order(300, 1) if order is None else fixed_order(order)
    model = nn.Linear(1, 1).double()
    data = (torch.randn(300, 1, generator=torch.Generator().manual_seed(3)), torch.arange(300) // 30)
    loader = loader or TensorLoader(data, 10, order_of)
    task = TrainingTask(model, torch.optim.SGD(model.parameters(), lr=0.1), loader, square_loss, length=length)
    manager = HookManager([hook], task, TrainingState(task.model, task.optimizer, RandomStreams(7)), loop="step")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        hook.start(run_info(task, manager, "step"))
    assert all(warning.category is RunNotice for warning in caught)
    return [str(warning.message) for warning in caught]


@pytest.mark.longer
def test_sorted_order_is_reported_and_random_is_not():
    """Alternating rows are reported as well."""
    (sentence,) = notices(GradientNoiseScale(), torch.arange(300))
    assert "neighbours among the first 256 rows are alike (correlation 0.9" in sentence
    swinging = torch.stack([torch.arange(150), torch.arange(299, 149, -1)], dim=1).flatten()
    assert "rows are unalike (correlation -1.00)" in notices(GradientNoiseScale(), swinging)[0]
    assert notices(GradientNoiseScale(), None) == []
    shuffles = [torch.randperm(300, generator=torch.Generator().manual_seed(seed)) for seed in range(20)]
    assert [notices(GradientNoiseScale(), order) for order in shuffles] == [[]] * 20


class Counting(TensorLoader):
    """Counts the batches that it has yielded."""

    given = 0

    def batches(self, epoch: int, start: int = 0):
        for batch in super().batches(epoch, start):
            self.given += 1
            yield batch


def test_order_check_does_not_advance_the_loader():
    """The loader counts the batches it yields."""
    loader = Counting((torch.randn(300, 1), torch.randn(300)), 10, random_order(300, 1))
    loader.given = 5
    notices(GradientNoiseScale(), None, loader=loader)
    assert loader.given == 5


def test_constant_or_ragged_rows_have_no_order():
    assert strongest_correlation([(torch.ones(4, 2),)] * 3) == (0.0, 12)
    ragged = [(torch.randn(4, length), "text") for length in (2, 3, 2)]
    assert strongest_correlation(ragged) == (0.0, 12)


@pytest.mark.parametrize(("options", "length"), [({}, 100), ({"decay": 0.0}, 400)])
def test_missing_error_is_explained_by_a_notice(options, length):
    """The run has too few measurements, or the decay is zero."""
    (sentence,) = notices(GradientNoiseScale(**options), None, length)
    assert "at least 2 measurements in one average" in sentence


@pytest.mark.parametrize("decay", [0.0, 0.5, 0.9, 1.0])
def test_signal_and_noise_are_averaged_before_division(decay):
    reports = measured(regression_task(6, length=12), GradientNoiseScale(every_n_steps=2, decay=decay))
    assert [report["step"] for report in reports] == [1, 3, 5, 7, 9, 11]
    for count, report in enumerate(reports, start=1):
        weights = [decay**age for age in reversed(range(count))]
        for name in ("signal", "noise"):
            values = [earlier[f"{name}_estimate"] for earlier in reports[:count]]
            average = sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)
            assert report[name] == pytest.approx(average, rel=1e-9)
        assert report["noise_scale"] == pytest.approx(report["noise"] / report["signal"], rel=1e-12)


def test_batch_of_one_row_is_skipped():
    assert {report["step"] for report in measured(regression_task(7, length=8), every_step())} == {1, 2, 3, 5, 6, 7}


def every_step() -> GradientNoiseScale:
    return GradientNoiseScale(every_n_steps=1)


@pytest.mark.longer
def test_resumed_hook_continues_its_averages():
    """After reset() the state is that of a new hook."""
    uninterrupted, task, first = (
        measured(regression_task(6, length=8), every_step()),
        regression_task(6, length=4),
        every_step(),
    )
    measured(task, first)
    file, second = io.BytesIO(), every_step()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second.load_state_dict(torch.load(file, weights_only=True))
    task.length = 8
    assert measured(task, second, {"step": 4, "epoch": 1}) == uninterrupted[4:]
    second.reset()
    assert described(second.state_dict()) == described(every_step().state_dict())


@pytest.mark.parametrize("accumulation_steps", [1, 3])
def test_accumulation_does_not_change_estimates(accumulation_steps):
    (row,) = measured(regression_task(10, length=1, accumulation_steps=accumulation_steps), GradientNoiseScale())
    (plain,) = measured(regression_task(10, length=1), GradientNoiseScale())
    assert row == pytest.approx(plain, rel=1e-9)


def test_measured_run_matches_bare_run():
    """The network has batch normalization and dropout."""
    run, bare = train(Case(), [every_step()], steps=6), train(Case(), steps=6)
    assert len(run.sink.rows("gradient_noise_scale/noise_estimate")) == 6
    assert all(row[3] >= 0 for row in run.sink.rows("gradient_noise_scale/noise_estimate"))
    assert run.digests == bare.digests
    assert run.manager.profiler.samples == {"gradient_noise_scale": {"forward_backward": 6 * BATCH}}


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"parts": 1}, "gradient_noise_scale.parts is 1; it must be at least 2"),
        ({"decay": 1.5}, "gradient_noise_scale.decay is 1.5; it must be in 0..1"),
        ({"decay": math.nan}, "gradient_noise_scale.decay is nan"),
        ({"every_n_steps": 0}, "every_n_steps is 0"),
    ],
)
def test_options_that_cannot_work_are_refused(options, reason):
    with pytest.raises(UsageError, match=reason):
        GradientNoiseScale(**options)
