"""Costs of a retrained interval: its steps, a start and a load, and no extra cost per step."""

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from loopscope.experiments.mod_arithmetic import ModArithmeticRunner
from loopscope.runs import RunOptions, Session, StepRange

from tests.benchmarks.rows import SECONDS, TIMES, Effort, Row
from tests.benchmarks.timing import Spread, clock

EPOCHS, LONG, SHORT = 9, 8, 2
"""Epochs of the run and of two intervals at its end: their difference is the cost of an epoch."""


def rewinds(effort: Effort) -> Iterator[Row]:
    """Compare retrained epochs with the same epochs in the run, evaluations and comparisons included."""
    ratios, starts = [], []
    for _ in range(max(2, effort.times(7))):
        with TemporaryDirectory() as folder:
            options = {**effort.quick, "epochs": EPOCHS, "max_epochs": EPOCHS, "output_dir": Path(folder)}
            config = ModArithmeticRunner.config_class(**options)
            run = RunOptions(strategies=["random"], save_checkpoints=1, keep_checkpoints=EPOCHS)
            session = Session(ModArithmeticRunner(config), run)
            (summary,) = session.run()
            steps = summary["steps"] // EPOCHS
            took = {}
            for epochs in (LONG, SHORT):
                first = (EPOCHS - epochs) * steps + 1
                begin = clock()
                session.rewind(StepRange(first, EPOCHS * steps), recorded=False)
                took[epochs] = clock() - begin
        again = (took[LONG] - took[SHORT]) / (LONG - SHORT)
        ratios.append(again / (summary["seconds"]["training"] / EPOCHS))
        starts.append(took[SHORT] - SHORT * again)
    yield Row("A retrained epoch", "the same epoch in the run, with its checkpoint", TIMES, Spread.of(ratios), 1.1)
    yield Row("The start of a rewind, with one load", "built, loaded, checked", SECONDS, Spread.of(starts))
