"""Tests of findings about runs with a planted cause, which the right change confirms and wrong ones do not."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from loopscope import sinks, training_hooks
from loopscope.doctor import Diagnosis, Finding, History
from loopscope.errors import UsageError
from loopscope.laboratory.questions import try_changes
from loopscope.runs import StepRange

from .planted import session

FILLED = (sinks, training_hooks)
STEP = 41


def finding(name: str, step: int) -> Finding:
    return Finding(name, "warning", step, "why", "next", confidence=0.7)


def files_of(folder: Path) -> dict[Path, bytes]:
    """Return the contents of the files of a run, without those of its rewinds."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and "rewinds" not in path.parts}


def spike_tests(folder: Path, step: int, plant: str, **options: Any) -> Diagnosis:
    """Train a run with a planted spike, then test the finding about it."""
    options = {"steps": STEP + 5, "plant_step": STEP, "plant": plant, **options}
    session(folder, **options).run()
    return try_on(folder, "loss-spike", step, **options)


def try_on(folder: Path, name: str, step: int, **options: Any) -> Diagnosis:
    """Test a finding about a run."""

    def train_again(stretch: StepRange, hook: str, hook_options: Mapping[str, Any]) -> Path:
        return session(folder, {hook: hook_options}, **options).rewind(stretch)[0]

    diagnosis = Diagnosis([finding(name, step)])
    return try_changes(train_again, folder / "planted/plain", diagnosis, History(), branches=4, steps=8)


def verdicts(diagnosis: Diagnosis) -> dict[str, bool | None]:
    """Return the verdict of each change."""
    return {item.change: item.confirms for item in diagnosis.findings[0].tests}


ROWS, PRECISION = "leaving out the rows of the event", "float32 in all passes"
STATE, CLIPPED = "a reset state of the optimizer", "clipping of the gradient norm at its recent median"
RATES = ("half the learning rate", "a tenth of the learning rate")


@pytest.mark.slow
def test_planted_learning_rate_is_confirmed(tmp_path):
    """One step at 100 times the learning rate; the rows, the precision and the optimizer's state are refuted."""
    diagnosis = spike_tests(tmp_path, STEP + 1, "rate")
    found = verdicts(diagnosis)
    assert found[RATES[1]] is True
    assert [found[name] for name in (ROWS, PRECISION, STATE)] == [False, False, False]
    assert diagnosis.findings[0].confidence > 0.7


@pytest.mark.slow
def test_planted_row_is_confirmed(tmp_path):
    """A corrupted row with a loss of 50; the precision is refuted, and smaller steps do not count."""
    found = verdicts(spike_tests(tmp_path, STEP, "corrupted_row", layer_norm=False))
    assert found[ROWS] is True
    assert found[PRECISION] is False
    assert True not in [found[name] for name in RATES]


@pytest.mark.slow
def test_planted_second_moments_are_confirmed(tmp_path):
    """Second moments of zero in one step; the rows and the precision are refuted."""
    found = verdicts(spike_tests(tmp_path, STEP + 1, "second_moment"))
    assert found[STATE] is True
    assert [found[name] for name in (ROWS, PRECISION)] == [False, False]


@pytest.mark.longer
def test_healthy_rate_is_refuted_and_files_stay(tmp_path):
    """Lower learning rates slow down a healthy run; the tests write to the folder of rewinds only."""
    session(tmp_path, steps=20).run()
    folder = tmp_path / "planted/plain"
    contents = files_of(folder)
    diagnosis = try_on(tmp_path, "learning-rate-too-high", 9, steps=20)
    assert [*verdicts(diagnosis).values()] == [False, False, False]
    assert diagnosis.findings[0].confidence < 0.7
    assert files_of(folder) == contents


def test_far_step_without_checkpoints_is_not_tested(tmp_path):
    diagnosis = Diagnosis([finding("learning-rate-too-high", 5000), finding("gradients-not-zeroed", 3)])
    result = try_changes(None, tmp_path, diagnosis, History(), branches=4, steps=8)
    assert [item.tests for item in result] == [(), ()]
    assert result.untested[1].startswith("learning-rate-too-high was not tested: the run has no checkpoint before step")


def test_wrong_numbers_are_refused(tmp_path):
    diagnosis = Diagnosis([finding("learning-rate-too-high", 3)])
    with pytest.raises(UsageError, match="branches is 3; an error needs at least 4"):
        try_changes(None, tmp_path, diagnosis, History(), branches=3, steps=8)
