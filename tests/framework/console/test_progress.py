import gc
import io
import random
import re
import time

import pytest
import torch
from loopscope.console.progress import BarView, LineView, Position, TrainingProgress, newest_numbers
from loopscope.doctor import RecentLosses
from loopscope.hooks import Series
from loopscope.state import LoopState
from rich.console import Console


class RecordingView:
    """Records the positions that it shows."""

    def __init__(self):
        self.shown = []
        self.finished = []

    def show(self, position):
        self.shown.append(position)

    def finish(self, position):
        self.finished.append(position)


class ManualClock:
    """A clock that the test sets."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def progress_of(view, clock, *, unit="step", length=1000, steps_per_epoch=None):
    return TrainingProgress(view, unit=unit, length=length, steps_per_epoch=steps_per_epoch, clock=clock)


def drive(progress, clock, steps, seconds):
    """Take steps of ``seconds`` each."""
    loop = LoopState()
    for loop.step in range(1, steps + 1):
        clock.now += seconds
        progress.step(loop)
    return loop


@pytest.mark.parametrize(("seconds", "updates"), [(1 / 1024, 2), (1 / 16, 125), (0.75, 1000)])
def test_view_updates_at_most_twice_a_second(seconds, updates):
    clock, view = ManualClock(), RecordingView()
    drive(progress_of(view, clock), clock, 1000, seconds)
    assert len(view.shown) == updates


def test_evaluations_are_throttled_like_steps():
    clock, view = ManualClock(), RecordingView()
    progress, loop = progress_of(view, clock), LoopState(step=1)
    for _ in range(5):
        progress.step(loop)
        progress.report_evaluation(loop)
    assert len(view.shown) == 1
    clock.now += 0.6
    progress.report_evaluation(loop)
    assert len(view.shown) == 2


def test_epochs_advance_with_their_steps():
    clock, view = ManualClock(), RecordingView()
    drive(progress_of(view, clock, unit="epoch", length=10, steps_per_epoch=4), clock, 10, 1.0)
    last = view.shown[-1]
    assert (last.done, last.share, last.rate) == (2.5, 0.25, 0.25)
    assert last.parts() == {"percent": "25%", "count": "epoch 2/10", "rate": "4 s/epoch", "left": "0:30 left"}


def test_last_position_shows_the_elapsed_time():
    """A stopped progress display ends with the time taken and the newest loss and evaluation."""
    clock, view = ManualClock(), RecordingView()
    progress = progress_of(view, clock)
    loop = drive(progress, clock, 10, 0.01)
    loop.epoch_loss, loop.evaluation = 0.5, {"train_acc": 0.25, "val_acc": 0.75}
    progress.stop()
    (last,) = view.finished
    assert last.done == 10
    assert last.parts()["left"] == "in 0:00"
    assert list(last.parts().values())[-2:] == ["loss 0.5", "val_acc 0.75"]


def test_run_without_steps_finishes_without_position():
    view = RecordingView()
    progress_of(view, ManualClock()).stop()
    assert view.finished == [None]


def test_throughput_covers_the_last_half_minute():
    """No throughput is shown at first, and a change of speed shows after half a minute."""
    clock, view = ManualClock(), RecordingView()
    progress, loop = progress_of(view, clock), LoopState()
    for second in range(100):
        clock.now += 1
        loop.step += 1 if second < 50 else 10
        progress.step(loop)
    assert view.shown[0].rate is None
    assert view.shown[20].rate == 1
    assert view.shown[-1].rate == 10


@pytest.mark.parametrize(
    ("loop", "numbers"),
    [
        (LoopState(), {}),
        (LoopState(loss=torch.tensor(2.5)), {"loss": 2.5}),
        (LoopState(epoch_loss=1.5, evaluation={"val_loss": 2.0, "other": 3.0}), {"loss": 1.5, "val_loss": 2.0}),
        (LoopState(epoch_loss=1.5, evaluation={"train_acc": 1.0, "val_acc": 0.5}), {"loss": 1.5, "val_acc": 0.5}),
    ],
)
def test_newest_numbers_are_loss_and_validation(loop, numbers):
    assert newest_numbers(loop, RecentLosses()) == numbers


@pytest.mark.parametrize(
    ("epochs", "running_loss", "loss"),
    [(0, None, 2.5), (1, torch.ones(1), 2.5), (2, torch.ones(1), 2.5), (2, None, 9.0)],
)
def test_progress_shows_the_newest_losses(epochs, running_loss, loss):
    """The mean of the last tenth of the steps, unless an epoch has just ended."""
    losses = RecentLosses()
    losses.add({"training_metrics/loss": Series([*range(1, 21)], [99.0] * 18 + [2.0, 3.0])})
    loop = LoopState(step=27, epoch_loss=9.0, running_loss=running_loss)
    assert newest_numbers(loop, losses, epochs) == {"loss": loss}


def lines_of(steps, seconds, **options):
    console, clock = Console(file=io.StringIO(), force_terminal=False, width=80), ManualClock()
    progress = progress_of(LineView(console, "stride", transient=True, clock=clock), clock, length=steps)
    drive(progress, clock, steps, seconds)
    progress.stop()
    return console.file.getvalue().splitlines()


def test_short_run_prints_a_line_every_tenth():
    lines = lines_of(1000, 0.1)
    assert [line.split(",")[0] for line in lines] == [f"stride: {percent}%" for percent in range(10, 100, 10)]


def test_long_run_prints_a_line_every_half_minute():
    """The lines have no control codes."""
    lines = lines_of(1000, 5.0)
    assert len(lines) == pytest.approx(1000 * 5.0 / 30, abs=10)
    assert not any("\x1b" in line for line in lines)


def test_permanent_lines_end_with_last_position():
    console, clock = Console(file=io.StringIO(), force_terminal=False, width=80), ManualClock()
    progress = progress_of(LineView(console, "stride", transient=False, clock=clock), clock)
    drive(progress, clock, 30, 0.1)
    progress.stop()
    assert console.file.getvalue() == "stride: 3%, step 30/1,000, 10 steps/s, in 0:03\n"


@pytest.mark.parametrize("width", [30, 60, 80, 120, 200])
def test_bar_fits_width_and_drops_least_important(width):
    """A narrow terminal loses throughput and position first, then the validation metric."""
    console = Console(file=io.StringIO(), force_terminal=True, force_interactive=True, width=width)
    view = BarView(console, "fixed-random", transient=False)
    view.show(Position("epoch", 4200.5, 5000, 2.125, {"loss": 1.234e-05, "val_acc": 0.98765}))
    view.finish(None)
    lines = re.split(r"[\n\r]", re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", console.file.getvalue()))
    drawn = next(line for line in lines if "84%" in line)
    assert max(len(line.rstrip()) for line in lines) <= width
    assert drawn.startswith("fixed-random ━")
    assert ("val_acc 0.9877" in drawn) == (width >= 80)
    assert ("2.12 epochs/s" in drawn) == ("epoch 4,200/5,000" in drawn) == (width >= 120)


@pytest.mark.guarantee("monitoring-changes-nothing")
def test_bar_uses_no_random_numbers():
    """The display draws no random numbers."""
    random.seed(1)
    before = random.getstate()
    console = Console(file=io.StringIO(), force_terminal=True, force_interactive=True, width=80)
    view = BarView(console, "stride", transient=True)
    view.show(Position("step", 1, 2, 1.0, {}))
    view.finish(None)
    assert random.getstate() == before


@pytest.mark.longer
def test_step_between_updates_takes_under_a_microsecond():
    """The best of twenty timings is below 0.6 microseconds."""
    progress, loop = progress_of(RecordingView(), time.monotonic), LoopState(step=1)
    progress.step(loop)
    gc.collect()
    best = min(timed(progress, loop) for _ in range(20))
    assert best < 0.6e-6


def timed(progress, loop, calls=2000):
    begin = time.perf_counter()
    for _ in range(calls):
        progress.step(loop)
    return (time.perf_counter() - begin) / calls
