"""The variance of gradients over windows against NumPy in float64, and on known signals and noises."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loopscope.errors import UnsuitableError, UsageError
from loopscope.hooks import HookPoint
from loopscope.state.digest import described
from loopscope.tensors import gradients
from loopscope.training_hooks.gradients import Variance
from torch import nn

from tests.support import LOOPS, MODELS, Case, SpyHook, assert_same_bytes, at, train
from tests.training_hooks.epoch_end import epoch_end
from tests.training_hooks.reloading import reloading


def expected(window: np.ndarray) -> dict[str, float]:
    """Compute the metrics of a window of gradients, shape (steps, elements), over all elements."""
    steps = len(window)
    variance, mean = window.var(axis=0, ddof=1).sum(), window.mean(axis=0)
    successive = np.square(np.diff(window, axis=0)).sum() / (2 * (steps - 1))
    return {
        "total_variance": variance,
        "mean_norm": np.linalg.norm(mean),
        "signal_to_noise": mean @ mean / variance,
        "noise_corrected_signal_to_noise": mean @ mean / variance - 1 / steps,
        "successive_variance": successive,
        "successive_ratio": successive / variance,
    }


def observe(hook: Variance, rows: np.ndarray, *, first: int = 1) -> dict[int, dict[str, float]]:
    """Feed gradients of shape (steps, elements) to a hook step by step; return its reports by step."""
    model, reports = nn.Module(), {}
    model.a, model.b = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(rows.shape[1] - 1))
    for step, row in enumerate(rows, start=first):
        if hook.step_schedule.is_due(step):
            model.a.grad, model.b.grad = torch.tensor(row[:1]).float(), torch.tensor(row[1:]).float()
            metrics = hook.compute(epoch_end(model, hook_point=HookPoint.POST_BACKWARD, step=step))
            if metrics:
                reports[step] = {name: float(value) for name, value in metrics.items()}
    return reports


def draws(steps: int, elements: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((steps, elements))


WINDOWS = st.one_of(
    st.tuples(st.integers(1, 4), st.integers(1, 4)).filter(lambda pair: pair[0] * pair[1] > 1),
    st.tuples(st.integers(2, 6), st.just(0)),
)


@pytest.mark.longer
@settings(max_examples=40, deadline=None)
@given(WINDOWS, st.integers(0, 9), st.integers(2, 30), st.integers(0, 99))
def test_separate_and_sliding_windows_match_numpy(pair, gap, steps, seed):
    window, every = (pair[0] * pair[1], pair[0]) if pair[1] else (pair[0], pair[0] + gap)
    rows = draws(steps, 5, seed) + 1
    reports = observe(Variance(window=window, every=every), rows)
    assert list(reports) == list(range(window, steps + 1, every))
    for step, report in reports.items():
        inside = rows[step - window : step]
        a, b = expected(inside[:, :1]), expected(inside[:, 1:])
        assert report["parameter_variance/a"] == pytest.approx(a["total_variance"], rel=1e-4)
        assert report["parameter_signal_to_noise/b"] == pytest.approx(b["signal_to_noise"], rel=1e-4)
        totals = {name: value for name, value in report.items() if "/" not in name}
        assert totals == pytest.approx(expected(inside), rel=1e-4, abs=1e-5)


class GradientLog(at(SpyHook, HookPoint.POST_BACKWARD)):
    """Keeps every step's gradient, flat, in float64."""

    def compute(self, ctx):
        self.seen.append(torch.cat([value.double().flatten() for value in gradients(ctx.model).values()]).numpy())
        return {}


@pytest.mark.some_rows(3)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("loop", LOOPS)
def test_windows_span_epoch_boundaries(loop, model):
    """The metrics of each window match NumPy on the logged gradients."""
    log = GradientLog()
    run = train(Case(model, loop=loop), [log, Variance(window=4, every=5)], steps=12)
    rows = run.sink.rows("variance/")
    assert {row[2] for row in rows} == {4, 9}
    for step in (4, 9):
        totals = {name.split("/")[1]: value for name, _, at, value in rows if at == step and name.count("/") == 1}
        assert totals == pytest.approx(expected(np.stack(log.seen[step - 4 : step])), rel=1e-3, abs=1e-5)


@pytest.mark.longer
@pytest.mark.some_rows(3)
@pytest.mark.parametrize("every", [2, 4, 5])
@pytest.mark.parametrize("case", [Case("tied", loop=loop) for loop in LOOPS], ids=str)
def test_resumed_hook_reports_the_same_variance(case, every):
    """The hook is reloaded before every call, and the run keeps its bytes."""
    uninterrupted = train(case, [Variance(window=4, every=every)], steps=12)
    reloaded = train(case, [reloading(Variance, window=4, every=every)], steps=12)
    assert uninterrupted.sink.rows("variance/")
    assert described(reloaded.sink.rows("variance/")) == described(uninterrupted.sink.rows("variance/"))
    assert_same_bytes(uninterrupted, case, 12)


def test_pure_noise_has_the_documented_ratios():
    report = observe(Variance(window=20), draws(20, 20_000))[20]
    assert report["signal_to_noise"] == pytest.approx(1 / 20, rel=0.05)
    assert report["noise_corrected_signal_to_noise"] == pytest.approx(0, abs=2e-3)
    assert report["successive_ratio"] == pytest.approx(1, rel=0.03)
    assert report["total_variance"] == pytest.approx(20_000, rel=0.03)


def test_planted_signal_is_recovered():
    rows = 3 * draws(20, 20_000) + 2
    assert observe(Variance(window=20), rows)[20]["noise_corrected_signal_to_noise"] == pytest.approx(4 / 9, rel=0.03)


@pytest.mark.parametrize(("elements", "window", "signal"), [(1, 4, 0.2), (3, 4, 0.2), (40, 5, 0.0)])
@pytest.mark.statistical
def test_corrected_ratio_mean_matches_documentation(elements, window, signal):
    """The mean over 20,000 windows equals the documented formula."""
    generator = np.random.default_rng(elements)
    offset = np.sqrt(signal * elements) * np.eye(elements)[0]
    ratios = []
    for window_gradients in generator.standard_normal((20_000, window, elements)) + offset:
        values = expected(window_gradients)
        ratios.append(values["mean_norm"] ** 2 / values["total_variance"] - 1 / window)
    freedom = (window - 1) * elements
    mean = (signal + 1 / window) * freedom / (freedom - 2) - 1 / window
    assert np.mean(ratios) == pytest.approx(mean, abs=5 * np.std(ratios) / np.sqrt(len(ratios)) + 0.02)


def test_successive_ratio_detects_drift_and_oscillation():
    """The ratio is near 0 under drift and near 2 for alternating gradients."""
    steps = np.arange(20.0)[:, None] * np.ones(3)
    assert observe(Variance(window=20), steps)[20]["successive_ratio"] < 0.05
    alternating = np.where(steps % 2 == 0, 1.0, -1.0)
    assert observe(Variance(window=20), alternating)[20]["successive_ratio"] == pytest.approx(1.9, rel=1e-6)


def test_equal_gradients_have_no_variance():
    report = observe(Variance(window=3), np.full((3, 2), 0.1))[3]
    assert report["total_variance"] == report["successive_variance"] == 0
    assert report["signal_to_noise"] == math.inf
    assert math.isnan(observe(Variance(window=3), np.zeros((3, 2)))[3]["signal_to_noise"])


def test_small_variance_survives_a_large_mean():
    """A mean 100,000 times the deviation leaves a relative error below 1e-3."""
    rows = 1000 + 0.01 * draws(20, 500)
    stored = rows.astype(np.float32).astype(np.float64)
    variance = observe(Variance(window=20), rows)[20]["total_variance"]
    assert variance == pytest.approx(expected(stored)["total_variance"], rel=1e-3)


def test_step_gap_starts_a_new_window():
    hook, rows = Variance(window=4, every=4), draws(8, 3)
    assert observe(hook, rows[:3]) == {}
    reports = observe(hook, rows[4:], first=11)
    assert list(reports) == [14]
    assert reports[14]["total_variance"] == pytest.approx(expected(rows[4:])["total_variance"], rel=1e-5)


def test_missing_gradient_counts_as_zero():
    """The parameter has no separate metric."""
    model, hook = nn.Linear(1, 1), Variance(window=2)
    reports = []
    for step, gradient in enumerate((1.0, 3.0), start=1):
        model.weight.grad = torch.tensor([[gradient]])
        reports.append(hook.compute(epoch_end(model, hook_point=HookPoint.POST_BACKWARD, step=step)))
    assert reports[0] == {}
    assert float(reports[1]["total_variance"]) == float(reports[1]["parameter_variance/weight"]) == 2
    assert not any(name.endswith("/bias") for name in reports[1])


def test_reset_discards_the_unfinished_window():
    hook, rows = Variance(window=4), draws(4, 3)
    observe(hook, rows[:3])
    hook.reset()
    assert observe(hook, rows[3:], first=4) == {}


def test_steps_between_windows_are_not_due():
    due = [step for step in range(1, 30) if Variance(window=3, every=10).step_schedule.is_due(step)]
    assert due == [1, 2, 3, 11, 12, 13, 21, 22, 23]


def test_a_run_shorter_than_a_window_is_refused():
    with pytest.raises(UnsuitableError, match="windows of 20 steps, but the run has only 3 steps"):
        raise train(Case(), [Variance()], steps=3, raises=UnsuitableError).error


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"window": 1}, "variance.window is 1; it must be at least 2"),
        ({"every": 0}, "variance.every is 0; it must be a divisor"),
        ({"window": 10, "every": 4}, r"variance.every is 4; it must be a divisor of variance.window \(10\)"),
    ],
)
def test_invalid_windows_are_refused(options, sentence):
    with pytest.raises(UsageError, match=sentence):
        Variance(**options)
