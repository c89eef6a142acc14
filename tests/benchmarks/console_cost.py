"""Costs of a run's displays: the same epochs with a display on a pseudo terminal, and without one."""

import os
import pty
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from operator import attrgetter
from pathlib import Path

from loopscope.console import Mode, RunConsole
from loopscope.engine import HookManager
from loopscope.hooks import RunInfo
from loopscope.loops import NoProgress, Progress, epoch_loop
from loopscope.training_hooks.progress import TrainingMetrics
from rich.console import Console

from tests.benchmarks.loop_cost import HeavyWork
from tests.benchmarks.rows import PERCENT, TIMES, Effort, Row
from tests.benchmarks.subjects import Subject, mod_arithmetic
from tests.benchmarks.timing import Spread, Turns, clock, ratio

MODES: dict[Mode, str] = {
    "live": "Epochs with --live",
    "normal": "Epochs with a bar and a table after each",
    "silent": "Epochs with --silent",
}


@contextmanager
def terminal() -> Iterator[Console]:
    """Yield a console on a pseudo terminal of 120x40 whose reader is another process."""
    master, slave = pty.openpty()
    with subprocess.Popen(["cat"], stdin=master, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as reader:
        os.close(master)
        with open(slave, "w", encoding="utf-8") as stream:
            options = {"width": 120, "height": 40, "force_terminal": True, "force_interactive": True}
            yield Console(file=stream, **options)  # type: ignore[arg-type]
        reader.wait()


class Shown:
    """The epochs of a run whose hook is ``training_metrics``, with the display of one mode.

    ``shares`` has for each epoch the part of its time that was spent in the display.
    """

    def __init__(self, subject: Subject, console: RunConsole | None = None) -> None:
        self._task, self._state = subject.task, subject.state
        hooks, sinks = [TrainingMetrics()], console.sinks() if console else []
        manager = HookManager(hooks, self._task, self._state, sinks=sinks)
        run = run_info(manager)
        manager.start(run)
        self._manager = manager
        self._progress: Progress = console.strategy_started(run, self._task, hooks) if console else NoProgress()
        self._work = HeavyWork()
        for owner, names in [
            (self._progress, ["step", "report_evaluation"]),
            *((sink, ["emit", "snapshot"]) for sink in sinks),
        ]:
            vars(owner).update({name: self._work.timed(attrgetter(name)(owner)) for name in names})
        self.shares: list[float] = []

    def epoch(self) -> None:
        """Train for an epoch."""
        self._task.length = self._state.loop.epoch + 1
        begin, before = clock(), self._work.seconds
        epoch_loop(self._task, self._manager, progress=self._progress)
        self.shares.append((self._work.seconds - before) / (clock() - begin))


def run_info(manager: HookManager) -> RunInfo:
    """Return the information of a run that writes no files."""
    return RunInfo(
        experiment="mod_arithmetic",
        strategy="stride",
        output_dir=Path("unused"),
        task=manager.task,
        loop="epoch",
        seed=0,
        optimizer_class=type(manager.task.optimizer),
        metric_infos=manager.hooks.metric_infos(),
    )


def displays(effort: Effort) -> Iterator[Row]:
    """Compare epochs with each display with epochs without any, in turn, on one model."""
    for mode, label in MODES.items():
        subject = mod_arithmetic(effort.quick)
        subject.task.snapshot_every = 1
        with terminal() as console, RunConsole(mode, console=console) as shown:
            ours, bare = Shown(subject, shown), Shown(subject)
            turns = Turns([ours.epoch, bare.epoch])
            for _ in range(1 + effort.times(60)):
                turns.round()
        value = ratio(*(seconds[1:] for seconds in turns.seconds))
        yield Row(label, "the same epochs without a console", TIMES, value, 1.03 if mode == "live" else None)
        share = Spread.of(ours.shares[1:])
        yield Row(f"{label}, own time", "the whole time", PERCENT, share, 0.03 if mode == "live" else None)
