"""Hook points, epoch windows and step schedules: the documented loop matches the actual loop in all cases."""

import inspect

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loopscope.data import TensorLoader, fixed_order
from loopscope.engine import HookManager
from loopscope.errors import UsageError
from loopscope.hooks import ALWAYS, STEP_POINTS, HookPoint, MetricSink, StepSchedule, windows_for
from loopscope.hooks.hook_points import POINTS_OF_LOOP
from loopscope.loops import epoch_loop
from loopscope.state import RandomStreams, TrainingState, Transient
from loopscope.training import TrainingTask
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from tests.support import Case, SpyHook, at, train


def documented_events(*, batches: int, epochs: int) -> list[str]:
    """Return the events of the loop in the docstring of HookPoint, unrolled."""
    block = inspect.cleandoc(HookPoint.__doc__).partition("::")[2]
    lines = [line for line in block.splitlines() if line.strip()]
    margin = min(len(line) - len(line.lstrip()) for line in lines)
    head = next(index for index, line in enumerate(lines) if line.strip() == "for each batch:")
    depth = len(lines[head]) - len(lines[head].lstrip())
    body = [line for line in lines[head + 1 :] if len(line) - len(line.lstrip()) > depth]
    assert margin < depth
    epoch = events(lines[:head]) + events(body) * batches + events(lines[head + 1 + len(body) :])
    return epoch * epochs


def events(lines: list[str]) -> list[str]:
    return [event for line in lines for event in line.strip().split(", ")]


class Log(Transient):
    """A log for optimizer, scheduler, hooks and sinks, which does not affect training."""

    def __init__(self):
        self.events = []

    def append(self, event):
        self.events.append(event)


class LoggingSGD(torch.optim.SGD):
    """Logs zero_grad and step."""

    def __init__(self, parameters, log):
        super().__init__(parameters, lr=0.1)
        self.log = log

    def zero_grad(self, set_to_none=True):
        self.log("zero_grad")
        super().zero_grad(set_to_none)

    def step(self, closure=None):
        self.log("optimizer.step")
        return super().step(closure)


class LoggingScheduler(LambdaLR):
    """Logs its steps as ``label``, if that is set."""

    label = None

    def step(self, epoch=None):
        if self.label:
            self.optimizer.log(self.label)
        super().step(epoch)


class FlushLog(MetricSink):
    """Logs the arrival of step metrics."""

    def __init__(self, log):
        self.log = log

    def emit(self, metrics, epoch, hook_point, *, step):
        if hook_point in STEP_POINTS:
            self.log.append("flush step metrics")


@pytest.mark.parametrize("interval", ["step", "epoch"])
def test_docstring_of_hook_point_matches_the_loop(interval):
    log = Log()
    model = nn.Linear(1, 1, bias=False)
    model.weight.register_hook(lambda gradient: log.append("backward"))
    optimizer = LoggingSGD(model.parameters(), log.append)
    scheduler = LoggingScheduler(optimizer, lambda epoch: 1.0)
    scheduler.label = f"per-{interval} scheduler"
    task = TrainingTask(
        model,
        optimizer,
        TensorLoader([torch.ones(4, 1)], 2, fixed_order(torch.arange(4))),
        lambda model, batch: log.append("forward") or model(batch[0]).mean(),
        evaluate=lambda model: log.append("evaluate") or {},
        scheduler=scheduler,
        scheduler_interval=interval,
        length=2,
        snapshot_every=1,
    )

    def log_point(ctx):
        log.append(ctx.hook_point.name)
        return {"one": 1.0} if ctx.hook_point is HookPoint.PRE_STEP else {}

    state = TrainingState(model, optimizer, RandomStreams(0), scheduler=scheduler)
    epoch_loop(task, HookManager([SpyHook(log_point)], task, state, sinks=[FlushLog(log)]))
    missing = {"step": "per-epoch scheduler", "epoch": "per-step scheduler"}[interval]
    assert log.events == [event for event in documented_events(batches=2, epochs=2) if event != missing]


def test_docstring_lists_points_in_enum_order():
    """The loop in the docstring of HookPoint contains every point once."""
    points = [event for event in documented_events(batches=1, epochs=1) if event in HookPoint.__members__]
    assert points == [point.name for point in HookPoint]


def test_step_loop_dispatches_step_points_and_snapshot():
    """Each step visits the four step points in order, and SNAPSHOT follows every second step."""
    spy = SpyHook()
    train(Case(loop="step"), [spy], steps=4, snapshot_every=2)
    step = ["PRE_STEP", "POST_BACKWARD", "PRE_UPDATE", "POST_STEP"]
    assert [name for name, _, _ in spy.seen] == [*step, *step, "SNAPSHOT", *step, *step, "SNAPSHOT"]


@pytest.mark.longer
def test_snapshots_follow_interval_and_last_epoch():
    """With snapshot_every=2 and five epochs, SNAPSHOT occurs in epochs 1, 3 and 4."""
    spy = SpyHook()
    train(Case(), [spy], steps=15, snapshot_every=2)
    assert [epoch for name, epoch, _ in spy.seen if name == "SNAPSHOT"] == [1, 3, 4]


@pytest.mark.parametrize("loop", ["epoch", "step"])
def test_step_number_is_constant_within_step(loop):
    """All four step points see the same number, and the first step is step 1."""
    spy = at(SpyHook, *STEP_POINTS)()
    train(Case(loop=loop), [spy], steps=6)
    assert [step for _, _, step in spy.seen] == [step for step in range(1, 7) for _ in range(4)]


@pytest.mark.parametrize("loop", ["epoch", "step"])
def test_hook_runs_at_points_of_its_loop(loop):
    """Without loop_points, a hook runs at all of its points that the loop has."""
    assert windows_for(frozenset(HookPoint), None, loop) == dict.fromkeys(POINTS_OF_LOOP[loop], ALWAYS)


def test_loop_points_take_precedence():
    """loop_points override hook_points, and the hook does not run in loops that loop_points omits."""
    loop_points = {"step": {HookPoint.POST_STEP}}
    assert windows_for({HookPoint.POST_EPOCH}, loop_points, "step") == {HookPoint.POST_STEP: ALWAYS}
    assert windows_for({HookPoint.POST_EPOCH}, loop_points, "epoch") == {}
    spy = at(SpyHook, HookPoint.POST_EPOCH, loop_points=loop_points)()
    train(Case(), [spy], raises=UsageError)
    assert spy.seen == []


def test_points_outside_of_steps_become_snapshot():
    """In the step loop, a hook whose points are all outside of steps runs at SNAPSHOT."""
    assert windows_for({HookPoint.PRE_EPOCH, HookPoint.POST_EPOCH}, None, "step") == {HookPoint.SNAPSHOT: ALWAYS}
    assert windows_for({HookPoint.POST_STEP, HookPoint.POST_EPOCH}, None, "step") == {HookPoint.POST_STEP: ALWAYS}


@pytest.mark.longer
@settings(max_examples=15)
@given(st.integers(0, 4), st.integers(0, 4), st.booleans(), st.booleans())
def test_window_includes_both_bounds(first, extra, open_start, open_end):
    window = (None if open_start else first, None if open_end else first + extra)
    epochs = [epoch for epoch in range(10) if in_window(window, epoch)]
    assert epochs == list(range(0 if open_start else first, 10 if open_end else first + extra + 1))


def in_window(window, epoch: int) -> bool:
    hook = at(SpyHook, loop_points={"epoch": {HookPoint.POST_EPOCH: window}})()
    manager = HookManager([hook], *tiny_run())
    manager.state.loop.epoch = epoch
    manager.fire(HookPoint.POST_EPOCH)
    return bool(hook.seen)


def tiny_run() -> tuple[TrainingTask, TrainingState]:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = TensorLoader([torch.ones(2, 1)], 1, fixed_order(torch.arange(2)))
    task = TrainingTask(model, optimizer, loader, lambda model, batch: model(batch[0]).mean())
    return task, TrainingState(model, optimizer, RandomStreams(0))


@pytest.mark.parametrize(
    ("point", "sentence"),
    [
        ("POST_EPOCH", r"Unknown hook point 'POST_EPOCH'\. Known members of HookPoint: PRE_EPOCH"),
        (5, "Unknown hook point 5"),
    ],
)
def test_manager_refuses_unknown_hook_point(point, sentence):
    """A string or a number in place of a HookPoint raises UsageError."""
    with pytest.raises(UsageError, match=sentence):
        HookManager([at(SpyHook, point)()], *tiny_run())


intervals = st.integers(1, 12)
warmups = st.integers(0, 20)


@st.composite
def schedules(draw):
    every = draw(intervals)
    mode = draw(st.sampled_from(["continual", "stride", "burst"]))
    length = draw(st.integers(1, every))
    return StepSchedule(mode=mode, every_n_steps=every, burst_length=length, warmup=draw(warmups))


def steps_by_definition(schedule: StepSchedule, last: int) -> list[int]:
    """Return the due steps by a loop over the periods after the warm-up."""
    every = 1 if schedule.mode == "continual" else schedule.every_n_steps
    length = schedule.burst_length if schedule.mode == "burst" else 1
    starts = range(schedule.warmup + 1, last + 1, every)
    return [step for start in starts for step in range(start, start + length) if step <= last]


@given(schedules(), st.integers(0, 60))
def test_schedule_matches_its_definition(schedule, last):
    """The first steps of every period after the warm-up are due, and no others."""
    assert [step for step in range(1, last + 1) if schedule.is_due(step)] == steps_by_definition(schedule, last)


@given(schedules(), st.integers(1, 5))
def test_whole_periods_have_equally_many_due_steps(schedule, periods):
    every = schedule.every_n_steps
    steps = range(schedule.warmup + 1, schedule.warmup + 1 + periods * every)
    per_period = {"continual": every, "stride": 1, "burst": schedule.burst_length}[schedule.mode]
    assert sum(map(schedule.is_due, steps)) == periods * per_period


@given(schedules(), st.integers(1, 60))
def test_schedule_repeats_after_the_warmup(schedule, step):
    later = step + schedule.warmup
    assert schedule.is_due(later) == schedule.is_due(later + schedule.every_n_steps)


@given(schedules())
def test_first_step_after_warmup_is_due(schedule):
    """No step of the warm-up is due."""
    assert schedule.is_due(schedule.warmup + 1)
    assert not any(map(schedule.is_due, range(1, schedule.warmup + 1)))


@given(intervals, warmups)
def test_extreme_bursts_match_continual_and_stride(every, warmup):
    """A burst as long as its period equals continual mode, and a burst of one step equals stride mode."""

    def due(mode, length):
        schedule = StepSchedule(mode=mode, every_n_steps=every, burst_length=length, warmup=warmup)
        return [schedule.is_due(step) for step in range(1, 50)]

    assert due("burst", every) == due("continual", 1)
    assert due("burst", 1) == due("stride", 1)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"mode": "sometimes"}, "Unknown step schedule 'sometimes'. Known: continual, stride, burst"),
        ({"every_n_steps": 0}, "every_n_steps is 0"),
        ({"mode": "burst", "every_n_steps": 3, "burst_length": 4}, r"burst_length is 4; it must be in 1\.\.every_n"),
        ({"mode": "burst", "burst_length": 0}, "burst_length is 0"),
        ({"warmup": -1}, "warmup is -1"),
    ],
)
def test_invalid_schedule_is_refused(options, sentence):
    with pytest.raises(UsageError, match=sentence):
        StepSchedule(**options)


@pytest.mark.parametrize("loop", ["epoch", "step"])
def test_bursts_are_aligned_at_all_four_points(loop):
    schedule = StepSchedule(mode="burst", every_n_steps=4, burst_length=2, warmup=1)
    spy = at(SpyHook, *STEP_POINTS, step_schedule=schedule)()
    train(Case(loop=loop), [spy], steps=9)
    points = ["PRE_STEP", "POST_BACKWARD", "PRE_UPDATE", "POST_STEP"]
    assert [(name, step) for name, _, step in spy.seen] == [(name, s) for s in (2, 3, 6, 7) for name in points]


@pytest.mark.parametrize("loop", ["epoch", "step"])
def test_schedule_applies_only_to_step_points(loop):
    spy = at(SpyHook, HookPoint.SNAPSHOT, step_schedule=StepSchedule(mode="stride", every_n_steps=100, warmup=50))()
    train(Case(loop=loop), [spy], snapshot_every=1)
    assert spy.seen
