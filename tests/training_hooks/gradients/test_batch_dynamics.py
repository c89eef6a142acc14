"""The dynamics of consecutive gradients against numpy in float64, and on gradients whose dynamics are planted."""

import doctest
import math

import numpy as np
import pytest
import torch
from loopscope.engine import HookManager
from loopscope.errors import UnsuitableError, UsageError
from loopscope.hooks import EVERY_STEP, HookPoint, RunDataContext, StepSchedule
from loopscope.tensors import gradients
from loopscope.training_hooks.gradients import BatchDynamics
from loopscope.training_hooks.gradients import batch_dynamics as module
from loopscope.training_hooks.gradients.batch_dynamics import LAGS, WINDOWS
from torch import nn

from tests.support import LOOPS, MODELS, Case, SpyHook, at, build, run_info, train
from tests.training_hooks.gradients.gradient_feed import cosine_error, feed, noise

SIZE = 400
REPORTS_OF_A_BURST = [2, 3, 5, 6, 10, 11, 20, 21, 30, 40, 50, 51, 60]


def expected(rows: torch.Tensor) -> dict[str, float]:
    """Compute every metric of consecutive gradients from its formula in float64."""
    g = rows.double().numpy()
    norms = np.linalg.norm(g, axis=1)
    sigma = np.linalg.svd(g, compute_uv=False)
    p = sigma / sigma.sum()
    metrics = {"effective_rank": np.exp(-(p * np.log(p)).sum()), "leading_share": sigma[0] ** 2 / (sigma**2).sum()}
    for lag in LAGS:
        pairs = [g[t] @ g[t - lag] / (norms[t] * norms[t - lag]) for t in range(lag, len(g))]
        metrics |= {f"autocorrelation_lag_{lag}": np.mean(pairs)} if pairs else {}
    for window in WINDOWS:
        if len(g) >= window:
            metrics[f"accumulation_efficiency_{window}"] = np.linalg.norm(g[-window:].sum(0)) / norms[-window:].sum()
    return {**metrics, "gradients": len(g)}


def autoregressive(steps: int, size: int, memory: float) -> torch.Tensor:
    """Draw gradients g_t = ρ·g_(t−1) + √(1−ρ²)·noise; their cosine at lag L is ρ^L up to a few 1/√size."""
    rows = [noise(size)]
    for step in range(1, steps):
        rows.append(memory * rows[-1] + math.sqrt(1 - memory**2) * noise(size, seed=step))
    return torch.stack(rows)


def test_burst_reports_match_numpy():
    rows = autoregressive(60, SIZE, 0.9) * torch.linspace(0.5, 2, 60)[:, None]
    reports = feed(BatchDynamics(), rows)
    assert list(reports) == REPORTS_OF_A_BURST
    for step, report in reports.items():
        assert report == pytest.approx(expected(rows[:step]), rel=1e-5, abs=1e-6)


def test_lags_and_windows_appear_when_complete():
    reports = feed(BatchDynamics(), noise(60, SIZE))
    for lag in LAGS:
        assert min(step for step in reports if f"autocorrelation_lag_{lag}" in reports[step]) == lag + 1
    for window in WINDOWS:
        assert min(step for step in reports if f"accumulation_efficiency_{window}" in reports[step]) == window


def test_parallel_gradients_accumulate_fully():
    report = feed(BatchDynamics(), torch.linspace(1, 5, 60)[:, None] * noise(SIZE))[60]
    exact = {name: value for name, value in report.items() if name != "gradients"}
    assert exact == pytest.approx(dict.fromkeys(exact, 1.0), rel=1e-5)


def test_alternating_gradients_cancel():
    signs = torch.tensor([1.0, -1.0] * 30)[:, None]
    report = feed(BatchDynamics(), signs * noise(SIZE))[60]
    for lag in LAGS:
        assert report[f"autocorrelation_lag_{lag}"] == pytest.approx((-1) ** lag, rel=1e-6)
    assert report["accumulation_efficiency_5"] == pytest.approx(1 / 5, rel=1e-5)
    assert report["accumulation_efficiency_10"] == pytest.approx(0, abs=1e-3)
    assert report["effective_rank"] == pytest.approx(1)


def test_orthogonal_gradients_have_full_rank():
    """They have no autocorrelation and accumulate like noise."""
    report = feed(BatchDynamics(), torch.eye(60))[60]
    assert all(report[f"autocorrelation_lag_{lag}"] == 0 for lag in LAGS)
    assert all(report[f"accumulation_efficiency_{w}"] == pytest.approx(w**-0.5) for w in WINDOWS)
    assert report["effective_rank"] == pytest.approx(60)
    assert report["leading_share"] == pytest.approx(1 / 60)


def test_planted_memory_decays_by_its_power():
    report = feed(BatchDynamics(), autoregressive(60, 20_000, 0.9))[60]
    for lag in LAGS:
        assert report[f"autocorrelation_lag_{lag}"] == pytest.approx(0.9**lag, abs=4 / math.sqrt(20_000))


@pytest.mark.parametrize("ratio", [0.5, 3.0])
def test_noise_ratio_gives_the_documented_autocorrelation(ratio):
    """Noise with r times the energy of the signal gives 1/(1 + r) at every lag."""
    signal = noise(20_000, seed=99)
    report = feed(BatchDynamics(), signal + math.sqrt(ratio) * noise(60, 20_000))[60]
    for lag in LAGS:
        assert report[f"autocorrelation_lag_{lag}"] == pytest.approx(1 / (1 + ratio), abs=4 / math.sqrt(20_000))


@pytest.mark.parametrize("rank", [1, 3, 7])
def test_planted_directions_are_counted(rank):
    directions = torch.linalg.qr(noise(SIZE, rank)).Q.T
    turns = torch.arange(42) % rank
    report = feed(BatchDynamics(history=42), directions[turns])[42]
    assert report["effective_rank"] == pytest.approx(rank, rel=1e-3)
    assert report["leading_share"] == pytest.approx(1 / rank, rel=1e-3)


@pytest.mark.longer
@pytest.mark.parametrize("memory", [0.0, 0.7, 0.98])
def test_projected_numbers_keep_within_their_stated_errors(memory):
    rows = autoregressive(60, 20_000, memory)
    true, report = expected(rows), feed(BatchDynamics(projection=4096), rows)[60]
    for lag in LAGS:
        name = f"autocorrelation_lag_{lag}"
        assert abs(report[name] - true[name]) < 4 * cosine_error(true[name], 4096)
    for window in WINDOWS:
        name = f"accumulation_efficiency_{window}"
        assert report[name] == pytest.approx(true[name], rel=4 * (2 * 4096) ** -0.5)
    assert report["effective_rank"] == pytest.approx(true["effective_rank"], rel=2 * math.sqrt(60 / 4096))


def test_bursts_do_not_mix_and_free_their_memory():
    hook, rows = BatchDynamics(history=5, every=8), noise(13, SIZE)
    reports = feed(hook, rows)
    assert list(reports) == [2, 3, 5, 10, 11, 13]
    assert reports[13] == pytest.approx(expected(rows[8:13]), rel=1e-5, abs=1e-6)
    assert hook.state_dict()["history"]["rows"] is None


def test_missed_step_starts_a_new_history():
    hook, rows = BatchDynamics(), noise(9, SIZE)
    feed(hook, rows[:4])
    reports = feed(hook, rows[5:], first=6)
    assert reports == {7: pytest.approx(expected(rows[5:7])), 8: pytest.approx(expected(rows[5:8]), rel=1e-5, abs=1e-6)}


def test_hook_resumed_mid_burst_reports_the_same():
    rows = noise(60, SIZE)
    uninterrupted, first, second = BatchDynamics(), BatchDynamics(), BatchDynamics()
    reports = feed(first, rows[:33])
    second.load_state_dict(first.state_dict())
    reports |= feed(second, rows[33:], first=34)
    assert reports == feed(uninterrupted, rows)


def test_reset_forgets_the_burst():
    hook = BatchDynamics()
    feed(hook, noise(7, SIZE))
    hook.reset()
    assert hook.state_dict()["step"] == 0
    assert hook.state_dict()["history"]["count"] == 0


class GradientLog(at(SpyHook, HookPoint.POST_BACKWARD)):
    """Keeps every step's gradients, concatenated, in float64."""

    def compute(self, ctx: RunDataContext) -> dict[str, float]:
        self.seen.append(torch.cat([value.double().flatten() for value in gradients(ctx.model).values()]))
        return {}


@pytest.mark.longer
@pytest.mark.some_rows(3)
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("model", MODELS)
def test_run_reports_match_step_gradients(model, loop):
    log, case = GradientLog(), Case(model, loop=loop)
    rows = train(case, [log, BatchDynamics()], steps=30, audit=False).sink.rows("batch_dynamics/")
    metrics = {name.removeprefix("batch_dynamics/"): value for name, _, step, value in rows if step == 30}
    assert metrics == pytest.approx(expected(torch.stack(log.seen)), rel=2e-3, abs=1e-4)


def test_nonfinite_or_zero_gradient_gives_nan():
    """Lags that do not involve the affected gradient remain finite."""
    rows = noise(3, SIZE)
    rows[1, 0] = math.inf
    report = feed(BatchDynamics(), rows)[3]
    assert math.isnan(report["autocorrelation_lag_1"])
    assert math.isnan(report["effective_rank"])
    assert not math.isnan(report["autocorrelation_lag_2"])
    nothing = feed(BatchDynamics(), torch.zeros(2, SIZE))[2]
    assert all(math.isnan(nothing[name]) for name in ("autocorrelation_lag_1", "effective_rank", "leading_share"))


def test_every_reported_name_is_described():
    infos = BatchDynamics().describe_metrics()
    report = feed(BatchDynamics(), noise(60, SIZE))[60]
    assert set(report) == {info.name for info in infos}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"history": 1}, "history is 1; lag 1 needs at least 2"),
        ({"every": 59}, "every is 59; it must be more than batch_dynamics.history"),
        ({"history": 7, "every": 7}, r"every is 7; .* the length of a burst \(7 steps\)"),
        ({"projection": 1000}, "batch_dynamics.projection is 1000"),
    ],
)
def test_options_that_cannot_work_are_refused(options, message):
    with pytest.raises(UsageError, match=message):
        BatchDynamics(**options)


def started(hook: BatchDynamics, steps: int, model: nn.Module | None = None) -> None:
    task, state = build(Case(loop="step"), steps=steps)
    task.model = model or task.model
    hook.start(run_info(task, HookManager([hook], task, state, loop="step"), "step"))


def test_runs_without_consecutive_steps_are_refused():
    """The run has one step, or the schedule has a stride of two."""
    started(BatchDynamics(), 2)
    with pytest.raises(UnsuitableError, match=r"'batch_dynamics' .* no two consecutive steps are due in the 1 steps"):
        started(BatchDynamics(), 1)
    strided = BatchDynamics()
    strided.step_schedule = StepSchedule(mode="stride", every_n_steps=2)
    with pytest.raises(UnsuitableError, match="no two consecutive steps"):
        started(strided, 100)
    strided.step_schedule = EVERY_STEP
    started(strided, 100)


def test_gradients_exceeding_memory_need_projection():
    """Without projection the model is refused."""
    model = nn.Linear(2**18, 1, bias=False)
    with pytest.raises(UnsuitableError, match=r"60 MiB .* batch_dynamics.memory allows 59"):
        started(BatchDynamics(memory=59), 100, model)
    started(BatchDynamics(memory=59, projection=16384), 100, model)


def test_examples_are_right():
    outcome = doctest.testmod(module)
    assert outcome.attempted
    assert not outcome.failed
