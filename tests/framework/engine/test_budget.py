"""The budget of the hooks' time: chosen schedules, their record, and runs that repeat them."""

import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import loopscope
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from loopscope.checkpoints import RunState
from loopscope.console import budget_text
from loopscope.digests import state_digests
from loopscope.engine import BudgetSettings, HookManager
from loopscope.engine.budget import (
    FIRST_WINDOW,
    MOST,
    WINDOW,
    CallCost,
    Factors,
    cost_per_step,
    denser,
    thinned,
    thinner,
)
from loopscope.hooks import HookPoint, StepSchedule
from loopscope.runs import read_decisions, read_history
from torch import nn

from tests.support import Case, SpyHook, at, train

CLOCK = "loopscope.engine.budget.thread_time"
STEP = 0.1
"""The CPU seconds of a step of the training."""


class Clock:
    """A clock of CPU time that tests move."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(CLOCK, made)
    return made


def costly(clock: Clock, name: str, seconds: float, **attributes: Any) -> SpyHook:
    """Return a hook after the backward pass that takes so many seconds."""

    def probe(ctx: Any) -> dict[str, float]:
        clock.seconds += seconds
        return {"value": float(ctx.step)}

    return at(SpyHook, HookPoint.POST_BACKWARD, name=name, **attributes)(probe)


class Reporter(SpyHook):
    """Reports the loss of every step, and takes the place of the training itself on the clock."""

    name = "reporter"
    hook_points = frozenset({HookPoint.POST_STEP})
    has_fixed_schedule = True
    loop_values: Mapping[str, str] = {"loss": "loss"}


def within(share: float, *names: str, **settings: Any) -> Callable[..., HookManager]:
    """Return a class of managers with a budget for these hooks."""
    return partial(HookManager, budget=BudgetSettings(share, names, **settings))


def trained(clock: Clock, hooks: list[Any], manager: Any, steps: int = 400, step: float = STEP, **options: Any) -> Any:
    """Train in a loop whose passes take time on the clock."""

    def introduce(task: Any, state: Any) -> None:
        inner = task.compute_loss

        def loss(*inputs: Any) -> Any:
            clock.seconds += step
            return inner(*inputs)

        task.compute_loss = loss

    case = Case(loop="step")
    return train(case, hooks, manager_class=manager, steps=steps, every_step=False, introduce=introduce, **options)


def steps_of(hook: SpyHook) -> list[int]:
    return [step for _, _, step in hook.seen]


# The choice


COSTS = st.builds(
    CallCost,
    hook=st.sampled_from("abcd"),
    point=st.sampled_from([1, 2, 4]),
    every=st.sampled_from([1, 4, 50, 100]),
    length=st.just(1),
    seconds=st.floats(0, 1e-2),
)
SHARED = st.fixed_dictionaries({point: st.floats(0, 1e-3) for point in (1, 2, 4)})


@given(st.lists(COSTS, min_size=1, max_size=8), SHARED, st.floats(1e-6, 1e-2))
def test_plan_is_within_the_budget_or_maximal(costs, shared, seconds) -> None:
    """Thinned schedules cost at most the given time, unless all of them are as thin as they may be."""
    cost = partial(cost_per_step, costs, shared, {})
    factors = thinner(cost, dict.fromkeys((item.hook for item in costs), 1), seconds)
    assert cost(factors) <= seconds or set(factors.values()) == {MOST}
    assert all(factor & (factor - 1) == 0 for factor in factors.values())
    relaxed = denser(cost, factors, seconds)
    assert cost(relaxed) <= max(seconds, cost(factors))
    assert all(relaxed[name] <= factors[name] for name in factors)


@given(st.integers(0, 6), st.sampled_from(["continual", "stride", "burst"]))
def test_thinned_steps_are_among_the_others(doublings, mode) -> None:
    """A thinned schedule keeps a subset of the steps, and bursts as long as before."""
    every = 1 if mode == "continual" else 6
    schedule = StepSchedule(mode=mode, every_n_steps=every, burst_length=min(every, 3), warmup=2)
    sparse = thinned(schedule, 2**doublings)
    due = [step for step in range(1, 1500) if sparse.is_due(step)]
    assert all(map(schedule.is_due, due))
    expected = sum(map(schedule.is_due, range(1, 1500))) / 2**doublings
    assert abs(len(due) - expected) <= schedule.burst_length


@given(
    st.sampled_from(["continual", "stride", "burst"]),
    st.integers(1, 7),
    st.integers(0, 5),
    st.sets(st.integers(1, 30), max_size=3),
    st.integers(1, 40),
)
def test_next_due_step_is_the_first(mode, every, warmup, also, step) -> None:
    """The next due step equals the first one of a search."""
    burst = min(every, 2)
    schedule = StepSchedule(mode=mode, every_n_steps=every, burst_length=burst, warmup=warmup, also=tuple(also))
    assert schedule.next_due(step) == next(at for at in range(step, 200) if schedule.is_due(at))


def test_cost_counts_shared_time_once_per_step() -> None:
    """Hooks at one point share the time around their calls; a hook that is not thinned pays it alone."""
    costs = [CallCost("a", 2, 1, 1, 1.0), CallCost("b", 2, 1, 1, 1.0)]
    factors: Factors = {"a": 4, "b": 8}
    assert cost_per_step(costs, {2: 8.0}, {}, factors) == pytest.approx(1 / 4 + 1 / 8 + 8 / 4)
    assert cost_per_step(costs, {2: 8.0}, {2: {1}}, factors) == pytest.approx(1 / 4 + 1 / 8)


# A run


def test_expensive_hook_is_thinned(clock: Clock) -> None:
    """After the first window the hooks' time is within the budget, and the more expensive hook is called less often."""
    large, cheap = costly(clock, "large", STEP), costly(clock, "small", STEP / 100)
    trained(clock, [large, cheap], within(0.05, "large", "small"))
    first, later = ([step for step in steps_of(large) if (step <= FIRST_WINDOW) is early] for early in (True, False))
    assert first == [*range(1, FIRST_WINDOW + 1)]
    assert STEP * len(later) <= 0.05 * STEP * (400 - FIRST_WINDOW)
    assert len(steps_of(cheap)) > len(steps_of(large))


def test_schedules_stay_without_need(clock: Clock) -> None:
    """Hooks that cost less than the budget are called at all of their steps."""
    hook = costly(clock, "small", STEP / 25)
    run = trained(clock, [hook], within(0.05, "small"))
    assert steps_of(hook) == [*range(1, 401)]
    assert run.manager.budget is not None
    assert run.manager.budget.report()["every"] == {}


def test_first_second_of_hooks_is_free(clock: Clock) -> None:
    """Hooks that take less than a second together keep their schedules, and the summary is silent."""
    hook = costly(clock, "large", 0.9 / 400)
    run = trained(clock, [hook], within(0.05, "large"), step=1e-4)
    assert steps_of(hook) == [*range(1, 401)]
    assert run.manager.budget is not None
    assert not run.manager.budget.report()


def test_named_hooks_have_no_budget(clock: Clock) -> None:
    """Only the hooks of the budget are thinned, and none whose schedule is a part of its measurement."""
    named, fixed = costly(clock, "named", STEP), costly(clock, "fixed", STEP, has_fixed_schedule=True)
    trained(clock, [named, fixed, costly(clock, "group", STEP)], within(0.05, "fixed", "group"))
    assert steps_of(named) == steps_of(fixed) == [*range(1, 401)]


@pytest.mark.slow
def test_loss_of_every_step_is_recorded(clock: Clock) -> None:
    """The loss is in the record at every step, with the bits of a run without a budget."""
    records = []
    for manager in (within(0.05, "large"), HookManager):
        sink = trained(clock, [costly(clock, "large", STEP), at(SpyHook, HookPoint.PRE_STEP)(), plain()], manager).sink
        records.append([(row[2], row[3]) for row in sink.rows("reporter/loss")])
    assert [step for step, _ in records[0]] == [*range(1, 401)]
    assert records[0] == records[1]


def plain() -> Reporter:
    return Reporter(lambda ctx: {"loss": ctx.loss} if ctx.hook_point is HookPoint.POST_STEP else {})


def test_weights_do_not_depend_on_the_budget(clock: Clock) -> None:
    """The training state is equal bit for bit with and without a budget."""
    runs = [trained(clock, [costly(clock, "large", STEP)], manager) for manager in (within(0.05, "large"), HookManager)]
    digests = [state_digests(run.state) for run in runs]
    assert digests[0] == digests[1]


@pytest.mark.slow
@pytest.mark.parametrize(("later", "spacings"), [(STEP / 10, 1), (10 * STEP, -1)], ids=["faster", "slower"])
def test_schedules_follow_the_training(clock: Clock, later: float, spacings: int) -> None:
    """Schedules become thinner once steps are faster, and denser once they are slower."""
    pace = iter([STEP] * 300 + [later] * 900)
    hook = costly(clock, "large", STEP / 2)
    run = trained(clock, [hook], within(0.05, "large"), steps=1200, step=Pace(pace))
    decisions = factors_of(run)
    assert len(decisions) >= 2
    values = [factors["large"] for factors in decisions.values()]
    assert (values[-1] - values[0]) * spacings > 0
    newest = [step for step in steps_of(hook) if step > 1200 - 2 * WINDOW]
    assert len(newest) * STEP / 2 <= 0.06 * later * 2 * WINDOW


class Pace:
    """Seconds of the next step."""

    def __init__(self, values: Iterator[float]) -> None:
        self.values = values

    def __radd__(self, seconds: float) -> float:
        return seconds + next(self.values)


def factors_of(run: Any) -> dict[int, dict[str, int]]:
    """Return the recorded factors by step."""
    found: dict[int, dict[str, int]] = {}
    for row in run.sink.rows("budget/thinning"):
        found[row[2]] = dict(row[3])
    return found


@pytest.mark.slow
def test_one_slow_window_does_not_relax(clock: Clock) -> None:
    """An evaluation that takes the time of a window leaves the schedules as they are."""
    times = [STEP] * (4 * WINDOW) + [STEP * 200] + [STEP] * (3 * WINDOW)
    hook = costly(clock, "large", STEP / 2)
    run = trained(clock, [hook], within(0.05, "large"), steps=len(times), step=Pace(iter(times)))
    assert len(factors_of(run)) == 1


@pytest.mark.slow
def test_repeated_decisions_give_equal_calls(clock: Clock) -> None:
    """A run with the decisions of another one calls its hooks at the same steps, at any cost."""
    first = costly(clock, "large", STEP)
    decisions = factors_of(trained(clock, [first], within(0.05, "large")))
    again = costly(clock, "large", 0.0)
    run = trained(clock, [again], partial(HookManager, budget=BudgetSettings(None, ["large"], decisions)))
    assert steps_of(again) == steps_of(first)
    assert factors_of(run) == decisions


def test_resumed_run_has_the_restored_schedules(clock: Clock) -> None:
    """A restored state contains the factors, which the resumed run uses from its first step on."""
    saved: list[Any] = []
    hook = costly(clock, "large", STEP)
    trained(
        clock, [hook], within(0.05, "large"), steps=200, checkpoint_every=100,
        save=lambda run: saved.append((run.state.loop.step, RunState(run.manager).take())),
    )  # fmt: skip
    step, content = saved[0]
    resumed = costly(clock, "large", STEP)
    manager = within(0.05, "large")

    def restoring(*inputs: Any, **options: Any) -> HookManager:
        made = manager(*inputs, **options)
        RunState(made).restore(content, Path("here"))
        return made

    trained(clock, [resumed], restoring, steps=200)
    assert steps_of(resumed) == [at for at in steps_of(hook) if at > step]


def test_hooks_get_their_schedules_back(clock: Clock) -> None:
    """After the end, another run of the same hook begins with its full schedule."""
    hook = costly(clock, "large", STEP)
    trained(clock, [hook], within(0.05, "large"))
    assert hook.step_schedule == StepSchedule()


@pytest.mark.parametrize("fixed", [0.02, 0.4])
def test_text_names_what_no_schedule_can_thin(fixed: float) -> None:
    """The line states when the loss of every step alone is above the budget."""
    text = budget_text({"budget": 0.05, "every": {"norms": 8}, "expected_hooks": 0.03, "fixed": fixed})
    assert ("above the budget of 5 %" in text) == (fixed > 0.05)
    assert text.startswith("norms every 8 steps, ")


# Attached trainings


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the budget hold from the first decision on."""
    monkeypatch.setattr("loopscope.engine.budget.FIRST_SECONDS", 0.0)


def attached(folder: Path | None, budget: Any = None, steps: int = 300, **options: Any) -> torch.Tensor:
    """Train a small network with the group health, and return its weights."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    x, y = torch.randn(16, 4), torch.randint(0, 3, (16,))
    options = {"display": "none", "loop": "step", "with_hooks": "health", **options}
    scope = None if folder is None else loopscope.attach(model, optimizer, out=folder, budget=budget, **options)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    if scope is not None:
        scope.close()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.mark.longer
@pytest.mark.filterwarnings("ignore::loopscope.hooks.Alert")
@pytest.mark.usefixtures("at_once")
def test_equal_schedules_give_equal_records(tmp_path: Path) -> None:
    """A run that repeats the schedules of another one has the same record, byte for byte, and the same weights."""
    bare = attached(None)
    weights = [attached(tmp_path / "a" / "run", 0.05), attached(tmp_path / "b" / "run", tmp_path / "a" / "run")]
    assert all(torch.equal(bare, one) for one in weights)
    assert read_decisions(tmp_path / "a" / "run")
    for name in ("run.jsonl", "digests.jsonl", "alerts.jsonl"):
        first, second = ((tmp_path / folder / "run" / name).read_bytes() for folder in "ab")
        assert first == second, name


@pytest.mark.longer
@pytest.mark.filterwarnings("ignore::loopscope.hooks.Alert")
@pytest.mark.usefixtures("at_once")
def test_health_is_thinned_in_the_record(tmp_path: Path) -> None:
    """The record has the loss of every step, sparse measurements, and the summary the schedules."""
    attached(tmp_path / "run", "5%")
    history = read_history(tmp_path / "run")
    assert history.curve("training_metrics/loss").steps.tolist() == [*range(1, 301)]
    assert 0 < len(history.curve("parameter_norms/total_grad_norm")) < 150
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["budget"]["every"]


@pytest.mark.parametrize("value", ["fast", "0", "150%", -0.1, 2, True, ""])
def test_wrong_budgets_are_refused(tmp_path: Path, value: object) -> None:
    """Anything but a share, none or the folder of a run is refused with one sentence."""
    with pytest.raises(loopscope.UsageError, match=r"budget is .*; it must be a share of the training's CPU time"):
        attached(tmp_path / "run", value)
