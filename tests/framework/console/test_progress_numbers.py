"""Progress metrics of an experiment: newest means of the current strategy on one line."""

import io
import math
from pathlib import Path

import pytest
from loopscope import training_hooks  # noqa: F401 - fills the registry
from loopscope.console import RunConsole
from loopscope.console.progress import Position, ProgressNumbers
from loopscope.hooks import HookPoint, Series
from rich.console import Console

from tests.framework.runs.small_experiment import SmallSteps, registered, session
from tests.sinks.emits import run_info

NAMES = {"loss": ["h/loss"], "over": ["h/elements", "h/tensors"], "val": ["h/evaluation/val_loss"]}
CHOSEN = {"loss": "loss 4.123", "reg": "reg 4.125", "over": "over 0.012/0.51"}


def emit(numbers, **metrics):
    numbers.emit({f"h/{name}": value for name, value in metrics.items()}, 0, HookPoint.POST_STEP, step=2)


def test_series_are_averaged_and_incomplete_labels_wait():
    """A label of two metrics is shown once both have a value."""
    numbers = ProgressNumbers(NAMES)
    emit(numbers, loss=Series([1, 2], [1.0, 2.0]), elements=0.125)
    assert numbers.texts() == {"loss": "loss 1.5"}
    emit(numbers, tensors=1.0, evaluation={"val_loss": 3.0}, other=5.0)
    assert numbers.texts() == {"loss": "loss 1.5", "over": "over 0.12/1", "val": "val 3"}


def test_series_with_both_infinities_is_nan():
    numbers = ProgressNumbers(NAMES)
    emit(numbers, loss=Series([1, 2], [math.inf, -math.inf]))
    assert numbers.texts() == {"loss": "loss nan"}


def test_next_strategy_starts_without_old_numbers(tmp_path):
    numbers = ProgressNumbers(NAMES)
    emit(numbers, loss=1.0)
    numbers.set_run_context(run_info(tmp_path))
    assert numbers.texts() == {}


@pytest.mark.parametrize(
    ("room", "line"),
    [
        (99, "40%  step 160/400  epoch 1.2  12.5 steps/s  0:19 left  loss 4.123  reg 4.125  over 0.012/0.51"),
        (85, "40%  step 160/400  epoch 1.2  0:19 left  loss 4.123  reg 4.125  over 0.012/0.51"),
        (62, "step 160  epoch 1.2  loss 4.123  reg 4.125  over 0.012/0.51"),
        (45, "step 160  epoch 1.2  loss 4.123  reg 4.125"),
    ],
)
def test_chosen_metrics_outlast_throughput_and_clock(room, line):
    """With less room, the line drops throughput, time and total before the metrics of the experiment."""
    position = Position("step", 160, 400, 12.5, {"loss": 4.5}, epoch=1.24, chosen=CHOSEN)
    assert position.fitted(room) == line


def test_chosen_metrics_are_dropped_before_the_step():
    """Even a line without room shows the step."""
    assert Position("step", 160, 400, 12.5, {}, epoch=1.24, chosen=CHOSEN).fitted(1) == "step 160"


class NamedProgress(SmallSteps):
    """Classify two noisy classes, with progress metrics."""

    name = "named_progress"
    progress_metrics = {"rate": ["training_metrics/lr"], "mean": ["training_metrics/loss"]}


@pytest.mark.longer
def test_piped_run_prints_step_epoch_and_named_metrics(tmp_path: Path):
    """The last line has the final step, the final epoch and the metrics that the experiment names."""
    out = io.StringIO()
    with registered(NamedProgress), RunConsole("silent", progress_metrics=NamedProgress.progress_metrics,
                                         console=Console(file=out, force_terminal=False)) as console:  # fmt: skip
        run = session(tmp_path, NamedProgress, epochs=40, log_every=3, hooks=["training_metrics"])
        run.make_sinks, run.display = console.sinks, console
        (summary,) = run.run()
    last = out.getvalue().splitlines()[-1]
    assert last.startswith("plain: 100%, step 120/120, epoch 40.0, ")
    assert f", loss {summary['training_loss']:.4g}, rate " in last
    assert ", mean 0." in last
