"""Live sessions without training: the metrics of an experiment, progress, warnings and prints."""

import select
import time
import warnings
from pathlib import Path

from loopscope.console import RunConsole
from loopscope.errors import RunNotice
from loopscope.hooks import HookPoint
from loopscope.state import LoopState
from loopscope.training import TrainingTask
from torch import nn

from tests.framework.console.test_run_console import OTHER, SUMMARY
from tests.sinks.emits import run_info

LIVE = {"accuracy": ["training_metrics/val_acc", "training_metrics/train_acc"], "loss": ["training_metrics/loss"]}
HOOKS = 18
METRICS = 6


def metrics(step):
    """Return about 110 metrics, including a rising, a falling and a constant one."""
    hook_metrics = {
        f"hook_{hook:02}/metric_{metric}": hook + metric / 8 + step
        for hook in range(HOOKS)
        for metric in range(METRICS)
    }
    return {
        "training_metrics/val_acc": 0.125 * step,
        "training_metrics/train_acc": 0.5,
        "training_metrics/loss": 12345.678 - 1000 * step,
        **hook_metrics,
    }


class Session:
    """A session of ``RunConsole`` with a clock that advances one second per step."""

    def __init__(self, mode="live", live_metrics=LIVE, **options):
        self.now = 0.0
        self.console = RunConsole(mode, live_metrics=live_metrics, clock=lambda: self.now, **options)
        self.task = TrainingTask(nn.Linear(9, 1), None, range(10), None, length=10)
        self.loop = LoopState()
        self.run = run_info(Path("output/exp/only"), loop="step", described=list(metrics(0)))

    def begin(self):
        """Start a strategy."""
        self.sinks = self.console.sinks()
        for sink in self.sinks:
            sink.set_run_context(self.run)
        self.progress = self.console.strategy_started(self.run, self.task, [])

    def step(self, *, waits=True):
        """Take a step with an emit; if it ``waits``, after the terminal has accepted earlier drawings."""
        if waits:
            select.select([], [1], [], 10)
        self.now += 1.0
        self.loop.step += 1
        for sink in self.sinks:
            sink.emit(metrics(self.loop.step), 0, HookPoint.POST_EPOCH, step=self.loop.step)
        self.progress.step(self.loop)

    def end(self):
        """End two strategies and the session."""
        self.console.strategy_ended(SUMMARY)
        self.console.strategy_ended(OTHER)
        self.console.ended([SUMMARY, OTHER])


def warn(sentence, category=UserWarning):
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn(sentence, category, stacklevel=1)


def run_session(mode="live"):
    """Run a complete session with a warning, a note and a print."""
    session = Session(mode)
    with session.console:
        session.begin()
        for _ in range(4):
            session.step()
        warn(
            "The loss is 0.123456789 and rises; this is the first of many words that do not all fit into two lines " * 2
        )
        warn("Left out: 'x'.", RunNotice)
        print("printed by the experiment")  # noqa: T201
        session.console.strategy_ended(SUMMARY)
        session.begin()
        session.step()
        session.console.strategy_ended(OTHER)
        session.console.ended([SUMMARY, OTHER])


def step_until(condition=lambda: False, seconds=20.0):
    """Step until a condition holds, or until a timeout at which tests fail."""
    session, end = Session(), time.monotonic() + seconds
    with session.console:
        session.begin()
        while not condition() and time.monotonic() < end:
            session.step()
            time.sleep(0.01)
        session.end()
