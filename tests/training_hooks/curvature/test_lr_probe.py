import io
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from loopscope.data import TensorLoader, fixed_order, random_order
from loopscope.engine import HookManager
from loopscope.errors import UsageError
from loopscope.loops import epoch_loop, step_loop
from loopscope.state import RandomStreams, TrainingState
from loopscope.training import TrainingTask
from loopscope.training_hooks.curvature import LrProbe
from loopscope.training_hooks.curvature.lr_probe import coming_batches, exponential_mean, growing_rates, range_metrics
from torch import Tensor, nn

from tests.support import RecordingSink, assert_same_bytes, train
from tests.support.cases import every_pair

RATES = torch.tensor(growing_rates(1e-6, 1.0, 61), dtype=torch.float64)
DECADES = RATES.log10()


def read(losses: Tensor, **options: float) -> dict[str, float]:
    settings = {"skip": 0, "divergence": 4.0} | options
    return {name: value.item() for name, value in range_metrics(RATES, losses, **settings).items()}


def planted() -> Tensor:
    """Return a loss that falls fastest at 1e-4, is smallest at 1e-2 and grows a hundredfold until 1."""
    fall = 1 - torch.sigmoid(6 * (DECADES + 4))
    rise = torch.where(DECADES > -2, 10 ** (2 * (DECADES + 2) * 0.8) - 1, 0.0)
    return 0.2 + fall + 0.2 * rise


def test_planted_curve_gives_planted_learning_rates():
    """The suggestion, the minimum and the divergence are at their planted learning rates."""
    found = read(planted())
    assert found["suggested_lr"] == pytest.approx(1e-4, rel=1e-6)
    assert found["min_loss_lr"] == pytest.approx(1e-2, rel=1e-6)
    assert found["min_loss"] == pytest.approx(planted()[40].item())
    first = next(index for index, loss in enumerate(planted()) if index > 40 and loss > 4 * planted()[40])
    assert found["divergence_lr"] == pytest.approx(RATES[first].item())


@pytest.mark.parametrize("blow_up", [math.nan, math.inf])
def test_non_finite_loss_counts_as_divergence(blow_up):
    """The minimum and the suggestion use only the losses before it."""
    losses = 2 - DECADES / 10
    losses[30:] = blow_up
    losses[40] = -math.inf
    found = read(losses)
    assert found["divergence_lr"] == pytest.approx(RATES[30].item())
    assert found["min_loss_lr"] == pytest.approx(RATES[29].item())
    assert found["suggested_lr"] < RATES[29].item()


def test_missing_events_are_nan():
    rising, falling = read(5 + DECADES / 10), read(5 - DECADES / 10)
    assert math.isnan(rising["suggested_lr"])
    assert math.isnan(rising["divergence_lr"])
    assert math.isnan(falling["divergence_lr"])
    assert rising["min_loss_lr"] == pytest.approx(1e-6)
    assert falling["min_loss_lr"] == pytest.approx(1.0)
    assert all(math.isnan(value) for name, value in read(torch.full((61,), math.nan)).items() if name[0] != "d")


def test_first_steps_are_ignored():
    losses = planted()
    losses[0], losses[1] = -3.0, 40.0
    assert read(losses)["min_loss_lr"] == pytest.approx(1e-6)
    assert read(losses, skip=2) == read(planted(), skip=2)


def test_negative_loss_diverges_by_equal_distance():
    """The divergence threshold of a negative loss has the same distance as that of a positive loss."""
    found = read(torch.where(DECADES < -3, -1.0, -1.0 + 4 * (DECADES + 3)))
    assert math.log10(found["divergence_lr"]) == pytest.approx(-2.2, abs=0.11)


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=20), st.floats(0, 0.99))
def test_smoothed_loss_is_weighted_mean(values, decay):
    """The smoothed values match a brute-force exponential mean with bias correction."""
    found = exponential_mean(torch.tensor(values, dtype=torch.float64), decay)
    for i in range(len(values)):
        weights = [decay ** (i - j) for j in range(i + 1)]
        expected = sum(w * v for w, v in zip(weights, values, strict=False)) / sum(weights)
        assert found[i].item() == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_smoothed_line_lags_as_documented():
    """On a straight line the smoothed loss lags by decay / (1 - decay)."""
    found = exponential_mean(torch.arange(400, dtype=torch.float64), 0.8)
    assert found[-1].item() == pytest.approx(399 - 0.8 / 0.2)


def test_rates_grow_geometrically_between_bounds():
    logs = RATES.log()
    torch.testing.assert_close(logs.diff(), torch.full((60,), math.log(1e6) / 60, dtype=torch.float64))
    assert (RATES[0].item(), RATES[-1].item()) == (1e-6, 1.0)


@pytest.mark.parametrize("step", [0, 2, 3, 7])
def test_probe_uses_the_next_batches(step):
    """The batches are those that the run sees next, across epochs."""
    loader = TensorLoader((torch.arange(7),), 3, random_order(7, 5))
    run = [batch[0].tolist() for epoch in range(5) for batch in loader.batches(epoch)]
    coming = coming_batches(loader, step)
    assert [next(coming)[0].tolist() for _ in range(6)] == run[step : step + 6]


class Plane(nn.Module):
    """A model of two parameters in different parameter groups."""

    def __init__(self) -> None:
        super().__init__()
        self.x, self.y = (nn.Parameter(torch.tensor(value, dtype=torch.float64)) for value in (1.0, -2.0))


def task_of(**options: float) -> TrainingTask:
    """Minimise the mean of a·(x² + 3y²) over the rows a of a batch."""
    model = Plane()
    groups = [{"params": [model.x], "lr": 0.01}, {"params": [model.y], "lr": 0.04}]
    loader = TensorLoader((torch.linspace(1, 2, 5, dtype=torch.float64),), 2, fixed_order(torch.arange(5)))
    return TrainingTask(
        model,
        torch.optim.SGD(groups, **options),
        loader,
        lambda model, batch: (batch[0] * (model.x**2 + 3 * model.y**2)).mean(),
        length=2,
        snapshot_every=1,
    )


def measured(task: TrainingTask, hook: LrProbe, loop=epoch_loop) -> list[tuple[int, dict]]:
    """Train with the hook and return its metrics by step."""
    state, sink = TrainingState(task.model, task.optimizer, RandomStreams(7)), RecordingSink()
    kind = "epoch" if loop is epoch_loop else "step"
    loop(task, HookManager([hook], task, state, loop=kind, sinks=[sink], audit=True))
    return [(step, {k.removeprefix("lr_probe/"): v for k, v in row.items()}) for row, _, _, step in sink.emitted]


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_losses_match_manual_range_test(momentum):
    """Losses, learning rates and metrics equal those of a manual loop from the same step."""
    hook = LrProbe(steps=12, smoothing=0.5, lr_min=1e-3, lr_max=0.5)
    ((step, found), (_, last)) = measured(task_of(momentum=momentum), hook)
    task = task_of(momentum=momentum)
    batches = [batch for epoch in range(9) for batch in task.loader.batches(epoch)]
    for batch in batches[:3]:
        task.optimizer.zero_grad(), task.compute_loss(task.model, batch).backward(), task.optimizer.step()
    losses = []
    for rate, batch in zip(growing_rates(1e-3, 0.5, 12), batches[3:], strict=False):
        task.optimizer.param_groups[0]["lr"], task.optimizer.param_groups[1]["lr"] = rate / 4, rate
        task.optimizer.zero_grad()
        loss = task.compute_loss(task.model, batch)
        loss.backward(), task.optimizer.step()
        losses.append(loss.item())
    assert step == 3
    assert found["losses"] == pytest.approx(losses, rel=1e-12)
    assert found["rates"] == growing_rates(1e-3, 0.5, 12)
    means = exponential_mean(torch.tensor(losses, dtype=torch.float64), 0.5)
    assert found["smoothed_losses"] == pytest.approx(means.tolist())
    expected = range_metrics(torch.tensor(found["rates"]), means, skip=2, divergence=4.0)
    for name, value in expected.items():
        assert found[name] == pytest.approx(value.item(), rel=1e-6, nan_ok=True)
    assert last["losses"][0] != found["losses"][0]


@pytest.mark.longer
def test_unstable_learning_rate_diverges():
    task = task_of()
    ((_, found), _) = measured(task, LrProbe(steps=200, smoothing=0.0, lr_min=1e-4, lr_max=100.0))
    threshold = 2 / (6 * 1.5)  # of y, whose curvature is 6a
    assert threshold < found["divergence_lr"] < 10 * threshold
    assert found["suggested_lr"] < threshold


def test_zero_learning_rates_grow_too():
    task = task_of()
    for group in task.optimizer.param_groups:
        group["lr"] = 0.0
    found = measured(task, LrProbe(lr_max=0.1))[0][1]
    assert found["losses"][-1] < found["losses"][0] / 2
    assert task.model.x.item() == 1.0


@pytest.mark.longer
@pytest.mark.some_rows(3)
@pytest.mark.guarantee("interventions-are-undone")
@every_pair
def test_probe_leaves_no_trace(case):
    """The run has the same bytes in every loop and with every optimizer."""
    run = train(case, [LrProbe(steps=9, smoothing=0.5)], steps=7)
    assert len(run.sink.rows("lr_probe/losses")) == (2 if case.loop == "epoch" else 4)
    assert_same_bytes(run, case, 7)


@pytest.mark.longer
def test_snapshot_interval_survives_resume():
    """The interval continues after a resume and restarts after reset()."""

    def steps(hook: LrProbe, length: int) -> list[int]:
        task = task_of()
        task.length = length
        return [step for step, values in measured(task, hook, step_loop) if values]

    assert steps(LrProbe(every=3), 8) == [1, 4, 7]
    first, second = LrProbe(every=3), LrProbe(every=3)
    assert steps(first, 2) == [1]
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second.load_state_dict(torch.load(file, weights_only=True))
    assert steps(second, 4) == [2]
    second.reset()
    assert steps(second, 2) == [1]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"lr_min": 0.0}, "lr_probe.lr_min is 0.0 and lr_probe.lr_max is 1.0; they must be positive and ascending"),
        ({"lr_min": 2.0}, "lr_probe.lr_min is 2.0"),
        ({"lr_max": math.inf}, "lr_probe.lr_max is inf"),
        ({"smoothing": 1.0}, "lr_probe.smoothing is 1.0; it must be at least 0 and below 1"),
        (
            {"steps": 7},
            "lr_probe.steps is 7; with lr_probe.smoothing = 0.8 it must be at least 8, of which the first 5",
        ),
        ({"divergence": 1.0}, "lr_probe.divergence is 1.0; it must be above 1"),
        ({"every": 0}, "lr_probe.every is 0; it must be at least 1"),
    ],
)
def test_invalid_options_are_refused(options, sentence):
    with pytest.raises(UsageError) as caught:
        LrProbe(**options)
    assert sentence in str(caught.value)
