"""What the displays of a run cost: the same epochs with a display on a pseudo terminal, and without one."""

import os
import pty
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from torch import nn

from framework.console import Mode, RunConsole
from framework.contexts import RunInfo
from framework.loops import NoProgress, Progress, epoch_loop
from framework.manager import HookManager
from tests.benchmarks.rows import TIMES, Effort, Row
from tests.benchmarks.subjects import Subject, mod_arithmetic
from tests.benchmarks.timing import Turns, ratio
from training_hooks.training_metrics import TrainingMetrics

EPOCHS_OF_A_BLOCK = 10
"""About two seconds, so that a block has a few drawings."""
EPOCHS_BETWEEN_TABLES = 10
MODES: dict[Mode, str] = {"live": "--live", "normal": "Bar, a table every tenth epoch", "silent": "--silent"}


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
    """Blocks of epochs of a run whose hook is ``training_metrics``, with the display of one mode."""

    def __init__(self, subject: Subject, epochs: int, console: RunConsole | None = None) -> None:
        self._task, self._state, self._epochs = subject.task, subject.state, epochs
        hooks = [TrainingMetrics()]
        manager = HookManager(hooks, self._task, self._state, sinks=console.sinks() if console else [])
        run = run_info(self._task.model, len(self._task.loader), manager)
        manager.start(run)
        self._manager = manager
        self._progress: Progress = console.strategy_started(run, self._task, hooks) if console else NoProgress()

    def block(self) -> None:
        """Train for a block."""
        self._task.length = self._state.loop.epoch + self._epochs
        epoch_loop(self._task, self._manager, progress=self._progress)


def run_info(model: nn.Module, steps_per_epoch: int, manager: HookManager) -> RunInfo:
    """Describe a run that writes no files."""
    return RunInfo(
        experiment="mod_arithmetic",
        strategy="stride",
        output_dir=Path("unused"),
        model=model,
        config=None,
        loop="epoch",
        seed=0,
        steps=steps_per_epoch,
        steps_per_epoch=steps_per_epoch,
        optimizer_class=type(manager.task.optimizer),
        metric_infos=manager.metric_infos(),
    )


def displays(effort: Effort) -> Iterator[Row]:
    """Compare epochs with each display with epochs without any, in turn, on one model."""
    for mode, label in MODES.items():
        subject = mod_arithmetic(effort.quick)
        subject.task.snapshot_every = EPOCHS_BETWEEN_TABLES
        epochs = effort.times(EPOCHS_OF_A_BLOCK)
        with terminal() as console, RunConsole(mode, console=console) as shown:
            blocks: list[Callable[[], None]] = [
                Shown(subject, epochs, shown).block,
                Shown(subject, epochs).block,
            ]
            turns = Turns(blocks)
            turns.round()
            turns.forget()
            for _ in range(effort.times(10)):
                turns.round()
        value = ratio(*turns.seconds)
        yield Row(f"Epochs with {label}", "without a console", TIMES, value, 1.03 if mode == "live" else None)
