"""The branches of ``hypothesis_test`` on a quadratic loss, whose rises have a closed form."""

import pytest
import torch
from loopscope.data import TensorLoader, fixed_order
from loopscope.engine import HookManager
from loopscope.errors import UsageError
from loopscope.laboratory import effect_of
from loopscope.loops import step_loop
from loopscope.state import RandomStreams, TrainingState
from loopscope.training import TrainingTask
from loopscope.training_hooks.laboratory import HypothesisTest
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR

from tests.support import RecordingSink, assert_same_bytes, train
from tests.support.cases import every_pair

CURVATURE, STEPS = 3.0, 10


class Point(nn.Module):
    """A model of one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))


def task_of(rows: torch.Tensor, length: int = 3, **options: float) -> TrainingTask:
    """Minimise ½·h·(x − mean of the batch)²."""
    model = Point()
    loader = TensorLoader((rows.double(),), 1, fixed_order(torch.arange(len(rows))))
    return TrainingTask(
        model,
        torch.optim.SGD(model.parameters(), **options),
        loader,
        lambda model, batch: CURVATURE / 2 * (model.x - batch[0].mean()).square(),
        length=length,
        snapshot_every=100,
    )


def measured(task: TrainingTask, **options: object) -> dict:
    """Train with the hook, and return its metrics by name."""
    state, sink = TrainingState(task.model, task.optimizer, RandomStreams(7), scheduler=task.scheduler), RecordingSink()
    step_loop(task, HookManager([HypothesisTest(**options)], task, state, loop="step", sinks=[sink], audit=True))
    rows = [row for row, *_ in sink.emitted if "hypothesis_test/rise" in row or "hypothesis_test/level" in row]
    return {name.removeprefix("hypothesis_test/"): value.values[0] for name, value in rows[0].items()}


def rise(factor: float, level: float) -> float:
    """Return the mean of L(θ_k) − L(θ₀) over k = 1 … K, where L(θ_k) = (1 − ηh)^{2k}·L(θ₀)."""
    values = [(1 - factor) ** (2 * step) - 1 for step in range(1, STEPS + 1)]
    return level * sum(values) / STEPS


@pytest.mark.longer
@pytest.mark.parametrize("product", [2.02, 2.05])
def test_halved_learning_rate_on_quadratic_loss(product):
    """Rises and removed share equal the closed form for learning rates beyond the stability limit 2/h."""
    task = task_of(torch.zeros(40), lr=product / CURVATURE)
    found = measured(task, step=2, steps=STEPS, changes="half_rate,tenth_rate")
    level = found["level"]
    assert level == pytest.approx(CURVATURE / 2 * 4 * (1 - product) ** 2)
    for name, factor in (("unchanged", 1), ("half_rate", 0.5), ("tenth_rate", 0.1)):
        assert found["rise"][name] == pytest.approx([rise(factor * product, level)] * 4)
    effect = effect_of(found["rise"]["unchanged"], found["rise"]["half_rate"], found["scale"])
    assert effect.value == pytest.approx(1 - rise(product / 2, level) / rise(product, level))
    assert effect.error == pytest.approx(0, abs=1e-12)
    assert effect.is_decisive(0.75)


@pytest.mark.longer
def test_tenfold_learning_rate_on_quadratic_loss():
    """Far below the limit, ten times the learning rate lets the loss fall ten times as fast."""
    found = measured(task_of(torch.zeros(40), lr=1e-4 / CURVATURE), steps=STEPS, changes="tenfold_rate")
    effect = effect_of(found["rise"]["unchanged"], found["rise"]["tenfold_rate"], found["scale"])
    assert effect.measure == "loss"
    assert effect.value == pytest.approx(rise(1e-4, 1) - rise(1e-3, 1))
    assert effect.value / -effect.unchanged == pytest.approx(9, rel=0.01)
    assert effect.is_decisive()


def test_branches_follow_the_schedule():
    """A changed learning rate does not enter the schedule of the next steps."""
    task = task_of(torch.zeros(40), lr=0.1 / CURVATURE)
    task.scheduler = ExponentialLR(task.optimizer, 0.5)
    found = measured(task, steps=2, changes="half_rate")
    start = CURVATURE / 2 * 4
    shrunk = [(1 - 0.05) ** 2, (1 - 0.05) ** 2 * (1 - 0.025) ** 2]
    assert found["rise"]["half_rate"] == pytest.approx([start * (sum(shrunk) / 2 - 1)] * 4)


@pytest.mark.longer
def test_weight_decay_and_clipping_change_steps():
    task = task_of(torch.zeros(40), lr=0.01, weight_decay=5.0)
    found = measured(task, steps=2, changes="no_decay,clipped", usual_norm=0.6)["rise"]
    start = 2.0
    plain, clipped = start * (1 - 0.01 * CURVATURE), start
    expected = [CURVATURE / 2 * (plain**2 - start**2), CURVATURE / 2 * ((plain * (1 - 0.03)) ** 2 - start**2)]
    assert found["no_decay"] == pytest.approx([sum(expected) / 2] * 4)
    losses = []
    for _ in range(2):
        clipped -= 0.01 * (0.6 + 5.0 * clipped)  # torch adds the decay after the clipping
        losses.append(CURVATURE / 2 * (clipped**2 - start**2))
    assert found["clipped"] == pytest.approx([sum(losses) / 2] * 4, rel=1e-5)


@pytest.mark.longer
def test_event_counts_against_other_batches():
    """Without the bad row the loss of its step counts as usual."""
    rows = torch.zeros(60)
    rows[4] = 100.0
    values = measured(task_of(rows, lr=0.1), step=3, event=3, steps=4, changes="without_rows,half_rate")
    found = values["rise"]
    assert min(found["unchanged"]) > 1
    assert values["ordinary"] == pytest.approx([0.0] * 16)
    assert effect_of(found["unchanged"], found["without_rows"], 1.0, values["ordinary"]).is_unusual
    effect = effect_of(found["unchanged"], found["without_rows"], 1.0)
    assert effect.is_decisive()
    assert not effect_of(found["unchanged"], found["half_rate"], 1.0).is_decisive(0.75)


@pytest.mark.parametrize("count", [90, 12])
def test_ordinary_rises_are_the_losses_of_other_batches(count):
    """At a learning rate of 0 they are losses above the level, without that of the event."""
    rows = torch.randn(count, generator=torch.Generator().manual_seed(5))
    found = measured(task_of(rows, lr=0.0), step=1, event=2, steps=4, changes="half_rate")
    losses = torch.tensor(found["ordinary"]) * 3 + found["level"]
    possible = CURVATURE / 2 * (2.0 - torch.cat([rows[:1], rows[2:]]).double()) ** 2
    assert len(losses) == 16
    assert (losses[:, None] - possible).abs().min(1).values.max() < 1e-5
    assert len({round(float(loss), 5) for loss in losses}) == min(16, count - 1)


@pytest.mark.statistical
def test_own_order_has_no_effect_on_average():
    """Over many states, unchanged branches on the run's own batches rise like those on other batches."""
    generator = torch.Generator().manual_seed(3)
    differences = []
    for _ in range(60):
        rows = torch.randn(60, generator=generator)
        rises = measured(task_of(rows, lr=0.2), steps=8, changes="half_rate")["rise"]["unchanged"]
        differences.append(sum(rises[1:]) / 3 - rises[0])
    values = torch.tensor(differences)
    assert abs(float(values.mean())) < 3 * float(values.std()) / len(values) ** 0.5


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"branches": 3}, "branches is 3; an error needs at least 4"),
        ({"changes": "half"}, "change 'half'"),
        ({"event": 10}, r"event is 10; it must be at least 0, and below steps \(10\)"),
        ({"changes": "without_rows"}, "without_rows needs hypothesis_test.event"),
    ],
)
def test_wrong_options_are_refused(options, sentence):
    with pytest.raises(UsageError, match=sentence):
        HypothesisTest(**options)


@pytest.mark.longer
@pytest.mark.some_rows(3)
@pytest.mark.guarantee("interventions-are-undone")
@every_pair
def test_branches_leave_no_trace(case):
    """The run has the same bytes in every loop and with every optimizer."""
    hook = HypothesisTest(step=2, steps=2, changes="half_rate,fresh_state,no_decay")
    run = train(case, [hook], steps=4)
    assert len(run.sink.rows("hypothesis_test/level")) == 1
    assert_same_bytes(run, case, 4)
