"""Spikes of planted series against NumPy, and of a real run with one bad batch."""

import io
import math
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from loopscope.data import TensorLoader, fixed_order
from loopscope.engine import HookManager
from loopscope.errors import UnsuitableError, UsageError
from loopscope.hooks import StepSchedule
from loopscope.loops import epoch_loop
from loopscope.state import RandomStreams, TrainingState
from loopscope.training import TrainingTask
from loopscope.training_hooks.clipping import GradClip
from loopscope.training_hooks.progress import LossSpikes
from torch import nn

from tests.support import Case, RecordingSink, train
from tests.training_hooks.epoch_end import epoch_end

Report = dict[str, float]


def watch(hook: LossSpikes, losses: list[float], norms: list[float] | None = None, **fields: Any) -> list[Report]:
    """Feed losses and gradient norms to a hook; return one report per step."""
    model, reports = nn.Linear(1, 1), []
    pairs = torch.tensor([losses, norms or losses], dtype=torch.float64)
    for loss, grad_norm in pairs.T:
        metrics = hook.compute(epoch_end(model, loss=loss, grad_norm=grad_norm, **fields))
        reports.append({name: float(value) for name, value in metrics.items()})
    return reports


def spiking_steps(reports: list[Report], signal: str = "loss") -> list[int]:
    """Return the indices of the steps at which the count of spikes grew."""
    counts = [report.get(f"{signal}_spike_count", 0) for report in reports]
    return [index for index, (before, now) in enumerate(zip([0, *counts], counts, strict=False)) if now > before]


def noise(count: int, seed: int = 0) -> list[float]:
    return np.random.default_rng(seed).normal(2.0, 0.1, count).tolist()


def by_the_rule(series: list[float], window: int, threshold: float) -> list[int]:
    """Apply the formula to every step after a full window."""
    spikes = []
    for index in range(window, len(series)):
        previous = np.array(series[index - window : index])
        if previous.std() >= 1e-10 and series[index] > previous.mean() + threshold * previous.std():
            spikes.append(index)
    return spikes


@pytest.mark.longer
@given(st.integers(0, 10**6), st.integers(2, 12), st.floats(0.5, 3), st.sets(st.integers(0, 39), max_size=4))
def test_spikes_and_deviations_match_the_formula(seed, window, threshold, planted):
    series = [value + 5 * (index in planted) for index, value in enumerate(noise(40, seed))]
    reports = watch(LossSpikes(window=window, threshold=threshold), series, series[::-1])
    assert spiking_steps(reports) == by_the_rule(series, window, threshold)
    for index in range(window, 40):
        previous = np.array(series[index - window : index])
        expected = (series[index] - previous.mean()) / previous.std()
        assert reports[index]["loss_deviation"] == pytest.approx(expected, rel=1e-6, abs=1e-9)


@pytest.mark.longer
def test_defaults_find_only_the_planted_spike():
    """The hook reports nothing until its window is full."""
    series = noise(400)
    series[100], series[300] = 9.0, 2.0 + 0.1 * 8
    reports = watch(LossSpikes(), series)
    assert spiking_steps(reports) == spiking_steps(reports, "grad_norm") == [300]
    assert all(report == {} for report in reports[:128])
    assert reports[-1]["loss_spike_count"] == 1


@pytest.mark.parametrize("window", [2, 16, 128])
@pytest.mark.parametrize("scale", [0.0, 1e-12, 1.0, 1e200])
def test_numbers_on_host_equal_those_on_devices(window, scale, monkeypatch):
    """The short calculation on the host gives the same bits, also with values that are not finite."""
    series = [value * scale for value in noise(window + 150)]
    series[window + 20], series[window + 40], series[5] = 50.0 * scale, math.inf, math.nan
    on_host = watch(LossSpikes(window=window), series, series[::-1])
    monkeypatch.setattr(LossSpikes, "_measured_on_host", lambda self, series: None)
    assert repr(watch(LossSpikes(window=window), series, series[::-1])) == repr(on_host)


def test_loss_and_gradient_norm_are_watched_separately():
    losses, norms = noise(60), noise(60, 1)
    losses[30], norms[40] = 4.0, 4.0
    reports = watch(LossSpikes(window=20), losses, norms)
    assert (spiking_steps(reports), spiking_steps(reports, "grad_norm")) == ([30], [40])


def test_lasting_rise_is_a_spike_only_once():
    """The spike is at the first step of the rise."""
    reports = watch(LossSpikes(window=20), noise(40) + [value + 2 for value in noise(40)])
    assert spiking_steps(reports) == [40]


@pytest.mark.parametrize(
    ("every", "words"), [(1, "the previous 16 steps ("), (4, "16 steps that were measured, one in 4 (")]
)
def test_alert_names_the_steps_of_its_window(every, words):
    """With a schedule that leaves out steps, the window of a spike is described by the measured ones."""
    hook = LossSpikes(window=16)
    hook.step_schedule = StepSchedule(mode="stride", every_n_steps=every)
    (alert,) = hook.check({"loss_rise": 0.1, "loss_deviation": 9.0, "grad_norm_deviation": 0.0}, 65)
    assert words in str(alert)


def test_constant_values_have_no_spikes():
    """Without any variance, the deviation is NaN."""
    reports = watch(LossSpikes(window=8), [0.1] * 20 + [50.0])
    assert spiking_steps(reports) == []
    assert math.isnan(reports[-1]["loss_deviation"])


@pytest.mark.parametrize(("overflow", "spikes"), [(math.inf, [30, 35]), (math.nan, [35])])
def test_overflow_does_not_hide_next_spike(overflow, spikes):
    """An infinite value is itself a spike, and NaN is not."""
    series = noise(60)
    series[30], series[35] = overflow, 4.0
    assert spiking_steps(watch(LossSpikes(window=20), series)) == spikes


def test_resumed_hook_matches_uninterrupted_hook():
    """After reset, the hook also reports like a new one."""
    series = [*noise(30), 5.0, *noise(30, 1), 6.0, *noise(10)]
    first, second, file = LossSpikes(window=20), LossSpikes(window=20), io.BytesIO()
    uninterrupted = watch(LossSpikes(window=20), series)
    watch(first, series[:40])
    torch.save(first.state_dict(), file)
    file.seek(0)
    second.load_state_dict(torch.load(file, weights_only=True))
    assert watch(second, series[40:]) == uninterrupted[40:]
    second.reset()
    assert watch(second, series[:40]) == uninterrupted[:40]


def frozen_regression(bad_row: int) -> TrainingTask:
    """Make a task that learns nothing from 40 rows with a loss of about 1, except for one of about 400."""
    targets = (
        torch.randn(40, 1, generator=torch.Generator().manual_seed(3)).sign() + torch.linspace(0, 0.1, 40)[:, None]
    )
    targets[bad_row] = 20.0
    model = nn.Linear(1, 1, bias=False)
    loader = TensorLoader((torch.ones(40, 1), targets), 1, fixed_order(torch.arange(40)))
    return TrainingTask(
        model,
        torch.optim.SGD(model.parameters(), lr=0.0),
        loader,
        lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
        length=2,
    )


@pytest.mark.longer
def test_bad_batch_warns_at_every_occurrence():
    """Each warning names the step and either the loss or the gradient norm."""
    task, sink = frozen_regression(bad_row=30), RecordingSink()
    state = TrainingState(task.model, task.optimizer, RandomStreams(1))
    with pytest.warns(UserWarning, match="spiked at step") as caught:
        epoch_loop(task, HookManager([GradClip(), LossSpikes(window=16)], task, state, sinks=[sink]))
    begins = [f"The {kind} spiked at step {step}: it was" for step in (31, 71) for kind in ("loss", "gradient norm")]
    assert [str(warning.message)[: len(begin)] for warning, begin in zip(caught, begins, strict=True)] == begins
    counts = [row[3] for row in sink.rows("loss_spikes/grad_norm_spike_count")]
    assert counts == [0] * 14 + [1] * 40 + [2] * 10


@pytest.mark.longer
@pytest.mark.filterwarnings("ignore::loopscope.hooks.Alert")
def test_spike_is_an_alert_at_its_step():
    """The sinks receive an alert with the metric, step, deviation and limit before the next step begins."""
    task, events = frozen_regression(bad_row=30), []

    class Sink(RecordingSink):
        def alert(self, alerts):
            events.extend((state.loop.step, alert.step, alert.metric, alert.limit) for alert in alerts)

    state = TrainingState(task.model, task.optimizer, RandomStreams(1))
    epoch_loop(task, HookManager([LossSpikes(window=16)], task, state, sinks=[Sink()]))
    metrics = "loss_deviation", "grad_norm_deviation"
    assert events == [(step, step, metric, 6.0) for step in (31, 71) for metric in metrics]


def severities(hook: LossSpikes, losses: list[float]) -> list[tuple[int, str]]:
    """Return step and severity of every alert about the loss."""
    alerts = []
    for step, report in enumerate(watch(hook, losses)):
        alerts += hook.check(report, step) if report else []
    return [(alert.step, alert.severity) for alert in alerts if alert.metric.startswith("loss")]


def test_spike_of_a_tiny_loss_is_a_remark():
    """From an initial loss of 4, the loss falls to 0.001 and jumps to 0.05."""
    losses = [4.0] * 16 + [0.001 + 0.0001 * (step % 2) for step in range(40)]
    assert severities(LossSpikes(window=16), [*losses, *[0.05] * 8]) == [(56, "info")]


def test_spike_that_recovers_is_a_remark():
    losses = [*noise(40), 5.0, *noise(20, 1)]
    assert severities(LossSpikes(window=16), losses) == [(40, "info")]


@pytest.mark.parametrize("first", [5.0, 3.1])
def test_spike_that_lasts_is_a_warning(first):
    """The rise may start with a small spike, and the warning has the step of the spike."""
    losses = [*noise(64), first, *[value + 4 for value in noise(20, 1)]]
    found = severities(LossSpikes(window=32), losses)
    assert found[0] == (64, "info")
    assert [alert for alert in found if alert[1] == "warning"] == [(64, "warning")]


def test_spike_above_the_initial_loss_warns_immediately():
    assert severities(LossSpikes(window=16), [*noise(40), 900.0, *noise(20)]) == [(40, "warning")]


def test_overflow_of_scaled_gradients_is_no_spike():
    """The scaler skips the step; without a scaler an infinite norm is a spike."""
    series = noise(60)
    norms = [*series[:30], math.inf, *series[31:]]
    assert spiking_steps(watch(LossSpikes(window=20), series, norms, loss_scale=2.0**16), "grad_norm") == []
    assert spiking_steps(watch(LossSpikes(window=20), series, norms), "grad_norm") == [30]


@pytest.mark.longer
def test_run_without_spikes_does_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run = train(Case("transformer"), [LossSpikes(window=10)], steps=36)
    assert {row[3] for row in run.sink.rows("loss_spikes/loss_spike_count")} == {0}


@pytest.mark.longer
def test_run_shorter_than_window_is_refused():
    """The run must have at least one step more than the window."""
    for steps, window in ((12, 12), (12, 128)):
        with pytest.raises(
            UnsuitableError, match=f"with the previous {window} steps, but the run has only {steps} steps; choose"
        ):
            train(Case(), [LossSpikes(window=window)], steps=steps)
    (row,) = train(Case(), [LossSpikes(window=11)], steps=12).sink.rows("loss_spikes/loss_deviation")
    assert row[2] == 12


@pytest.mark.parametrize(
    "options", [{"window": 1}, {"threshold": 0.0}, {"threshold": math.inf}, {"threshold": math.nan}]
)
def test_options_that_cannot_work_are_refused(options):
    ((name, value),) = options.items()
    with pytest.raises(UsageError, match=f"loss_spikes.{name} is {value}; "):
        LossSpikes(**options)
