"""The diagnostics against NumPy, on planted series and in real runs."""

import io
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from loopscope.errors import UnsuitableError, UsageError
from loopscope.hooks import HookPoint, RunDataContext
from loopscope.training_hooks.clipping import GradClip
from loopscope.training_hooks.progress import TrainingDiagnostics
from loopscope.training_hooks.progress.training_diagnostics import autocorrelation, spread
from torch import nn

from tests.support import Case, Run, SpyHook, at, train
from tests.training_hooks.epoch_end import epoch_end


class Log(at(SpyHook, HookPoint.PRE_UPDATE)):
    """Keeps losses and gradient norms, in float64."""

    name = "log"

    def __init__(self) -> None:
        self.losses, self.norms = [], []

    def compute(self, ctx: RunDataContext) -> dict[str, float]:
        self.losses.append(ctx.loss.item())
        self.norms.append(torch.cat([value.grad.double().flatten() for value in ctx.model.parameters()]).norm().item())
        return {}


def reports(run: Run) -> list[dict[str, float]]:
    """Return the hook's reports between steps, one dict for each visit."""
    points = (HookPoint.POST_EPOCH, HookPoint.SNAPSHOT)
    return [
        {name.removeprefix("training_diagnostics/"): value for name, value in metrics.items()}
        for metrics, _, point, _ in run.sink.emitted
        if point in points
    ]


def by_numpy(losses: list[float], norms: list[float], lags: int) -> dict[str, float]:
    expected = {
        "window_steps": len(losses),
        "loss_volatility": np.std(losses),
        "grad_norm_mean": np.mean(norms),
        "grad_norm_variation": np.std(norms) / np.mean(norms),
    }
    if len(losses) > 2:
        expected["loss_change_volatility"] = np.std(np.diff(losses))
    centred = np.array(losses) - np.mean(losses)
    for lag in range(1, min(lags, len(losses) // 4) + 1):
        pairs = zip(centred, centred[lag:], strict=False)
        expected[f"loss_autocorrelation_lag_{lag}"] = sum(a * b for a, b in pairs) / sum(centred**2)
    return expected


@pytest.mark.longer
@pytest.mark.some_rows(2)
@pytest.mark.parametrize("case", [Case(), Case("tied", "sgd_momentum"), Case("transformer", loop="step")], ids=str)
def test_reports_match_the_newest_steps(case):
    log = Log()
    run = train(case, [log, TrainingDiagnostics(window=9, lags=2)], steps=12)
    ends = [3, 6, 9, 12] if case.loop == "epoch" else [2, 4, 6, 8, 10, 12]
    for end, report in zip(ends, reports(run), strict=True):
        newest = slice(max(0, end - 9), end)
        expected = by_numpy(log.losses[newest], log.norms[newest], lags=2)
        assert report == pytest.approx(expected, rel=1e-4, abs=1e-9)


def test_gradient_norm_is_measured_before_clipping():
    run = train(Case(), [GradClip(max_norm=1e-3), TrainingDiagnostics()])
    norms = [row[3] for row in run.sink.rows("grad_clip/norm_before")]
    (report,) = reports(run)
    assert report["grad_norm_mean"] == pytest.approx(np.mean(norms), rel=1e-6)
    assert report["grad_norm_variation"] == pytest.approx(np.std(norms) / np.mean(norms), rel=1e-4)
    assert min(norms) > 0.1


def test_autoregression_autocorrelation_decays_geometrically():
    """The autocorrelation at each lag is the coefficient to the power of the lag."""
    draws = np.random.default_rng(0).normal(size=20000)
    series = [draws[0]]
    for draw in draws[1:]:
        series.append(0.8 * series[-1] + draw)
    for lag in (1, 2, 5):
        assert autocorrelation(torch.tensor(series), lag).item() == pytest.approx(0.8**lag, abs=0.03)


@pytest.mark.longer
@given(st.lists(st.floats(-100, 100), min_size=4, max_size=30).filter(lambda values: np.std(values) > 1e-3))
def test_autocorrelation_matches_numpy_and_is_invariant(values):
    """It does not change under scale and shift."""
    series = torch.tensor(values, dtype=torch.float64)
    expected = by_numpy(values, [1.0] * len(values), lags=1)["loss_autocorrelation_lag_1"]
    assert autocorrelation(series, 1).item() == pytest.approx(expected, rel=1e-6, abs=1e-9)
    for lag in (1, 2):
        moved = autocorrelation(3 - 2 * series, lag)
        torch.testing.assert_close(moved, autocorrelation(series, lag), rtol=1e-6, atol=1e-6)


def test_equal_values_have_no_scatter_and_no_autocorrelation():
    equal = torch.full((7,), 0.1, dtype=torch.float64)
    assert spread(equal) == 0
    assert autocorrelation(equal, 1).isnan()


def feed(hook: TrainingDiagnostics, steps: range) -> list[dict[str, float]]:
    """Feed planted losses and norms to a hook, one step a report; return the reports."""
    reports_by_step = []
    for step in steps:
        pair = torch.tensor([[math.sin(step)], [step % 5]], dtype=torch.float64)
        hook = through_a_file(hook) if step == 8 else hook
        report = hook.compute(epoch_end(nn.Linear(1, 1), step_losses=pair[0], step_grad_norms=pair[1]))
        reports_by_step.append({name: float(value) for name, value in report.items()})
    return reports_by_step


def through_a_file(hook: TrainingDiagnostics) -> TrainingDiagnostics:
    file, fresh = io.BytesIO(), TrainingDiagnostics(window=8, lags=2)
    torch.save(hook.state_dict(), file)
    file.seek(0)
    fresh.load_state_dict(torch.load(file, weights_only=True))
    return fresh


def test_hook_saved_between_reports_continues_unchanged():
    """The final report matches NumPy over the whole window."""
    hook = TrainingDiagnostics(window=8, lags=2)
    reported = feed(hook, range(1, 14))
    losses, norms = [math.sin(step) for step in range(6, 14)], [step % 5 for step in range(6, 14)]
    expected = by_numpy(losses, norms, lags=2)
    assert reported[-1] == pytest.approx(expected, rel=1e-6)


def test_reset_forgets_everything():
    hook = TrainingDiagnostics(window=8, lags=2)
    first = feed(hook, range(1, 7))
    hook.reset()
    assert hook.compute(epoch_end(nn.Linear(1, 1))) == {}
    assert feed(hook, range(1, 7)) == first


def test_undefined_statistics_are_omitted_at_first():
    """Each of the first four steps adds the statistics that it defines."""
    first, second, third, fourth = feed(TrainingDiagnostics(), range(1, 5))
    assert first.keys() == set()
    assert second.keys() == {"window_steps", "loss_volatility", "grad_norm_mean", "grad_norm_variation"}
    assert third.keys() - second.keys() == {"loss_change_volatility"}
    assert fourth.keys() - third.keys() == {"loss_autocorrelation_lag_1"}


def test_a_run_of_one_step_is_refused():
    with pytest.raises(UnsuitableError, match="'training_diagnostics' compares steps and needs at least 2, but"):
        train(Case(loop="step"), [TrainingDiagnostics()], steps=1)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"window": 1}, "window is 1; it must be at least 2"),
        ({"lags": 26}, r"lags is 26; it must be in 0\.\.25: .* 4 values per lag"),
        ({"window": 12, "lags": -1}, r"lags is -1; it must be in 0\.\.3"),
    ],
)
def test_options_that_cannot_work_are_refused(options, reason):
    with pytest.raises(UsageError, match=f"training_diagnostics.{reason}"):
        TrainingDiagnostics(**options)
