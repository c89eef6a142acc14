"""Runs with a budget that are trained again: ``verify`` and ``rewind`` use the recorded schedules."""

from pathlib import Path
from typing import Any

import pytest
from loopscope import sinks, training_hooks
from loopscope.runs import StepRange, read_decisions

from tests.framework.runs.small_experiment import Small, SmallSteps, session
from tests.framework.runs.test_rewinding import assert_the_same, points

FILLED = (sinks, training_hooks)
OPTIONS: dict[str, Any] = {
    "strategies": ["plain"],
    "epochs": 40,
    "with_hooks": "health",
    "checkpoint_every_steps": 50,
    "keep_checkpoints": 9,
}

pytestmark = [
    pytest.mark.usefixtures("patient_small"),
    pytest.mark.filterwarnings("ignore::loopscope.hooks.Alert"),
    pytest.mark.longer,
]


@pytest.fixture(scope="module", params=[Small, pytest.param(SmallSteps, marks=pytest.mark.slow)])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, type[Small]]:
    """Train a run whose hooks cost more than its steps, so that they are thinned after the first window."""
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("loopscope.engine.budget.FIRST_SECONDS", 0.0)
        session(folder, request.param, **OPTIONS, budget="5%").run()
    return folder, request.param


def test_verified_run_has_the_recorded_schedules(trained: tuple[Path, type[Small]]) -> None:
    """The run equals all checkpoints, with the memory of hooks that were called at the same steps."""
    folder, runner = trained
    assert read_decisions(folder / runner.name / "plain")
    compared = session(folder, runner, **OPTIONS, budget="5%").validate()
    assert {50, 100} <= {*compared["plain"]}


def test_rewound_steps_have_the_recorded_metrics(trained: tuple[Path, type[Small]]) -> None:
    """Steps that are trained again from a checkpoint have the metrics that the run recorded there."""
    folder, runner = trained
    stretch = StepRange(70, 90)
    path, since, _ = session(folder, runner, **OPTIONS, budget="5%").rewind(stretch)
    assert since == 50
    assert_the_same(path, folder / runner.name / "plain", 51, 90)


def test_loss_of_every_step_is_in_both_loops(trained: tuple[Path, type[Small]]) -> None:
    """A hook that reports it, with any schedule, has a loss at each of the 120 steps."""
    folder, runner = trained
    name = "training_metrics/loss" if runner is SmallSteps else "training_checks/loss"
    steps = {step for metric, _, step in points(folder / runner.name / "plain") if metric == name}
    assert steps == {*range(1, 121)}
