"""The doctor names the planted faults of the zoo, and is quiet about healthy trainings."""

import subprocess
import sys
from pathlib import Path

import pytest
from loopscope.doctor import Diagnosis, Finding, diagnose

from tests.docs.markdown import ROOT
from tests.zoo.case import CASES, Case
from tests.zoo.faults import data, loops, parameters, rates
from tests.zoo.healthy import unusual, usual
from tests.zoo.outcome import DATA, check_same_findings, median_losses, result_of, train

MODULES = (data, loops, parameters, rates, unusual, usual)
STEPS = 60
"""Steps of the quick tests."""
QUICK_FAULTS = (
    "adapter-is-not-called",
    "gradients-are-never-zeroed",
    "head-is-not-in-the-optimizer",
    "sgd-rate-300-times-too-high",
    "softmax-before-cross-entropy",
    "zero-grad-between-backward-and-step",
)
QUICK_HEALTHY = (
    "binary-classification",
    "mlp-with-adam",
    "mlp-with-sgd",
    "mlp-without-validation",
    "gradients-from-autograd-grad",
    "dropout-of-one-half",
)


@pytest.mark.some_rows(2)
@pytest.mark.longer
@pytest.mark.parametrize("name", QUICK_FAULTS)
def test_planted_cause_is_the_first_finding(name: str, tmp_path: Path) -> None:
    recorder = train(CASES[name], tmp_path, STEPS)
    check_same_findings(recorder)
    (diagnosis,) = recorder.diagnoses()
    assert result_of(CASES[name], diagnosis) == "first", str(diagnosis)


@pytest.mark.some_rows(2)
@pytest.mark.longer
@pytest.mark.parametrize("name", QUICK_HEALTHY)
def test_healthy_training_has_no_warning(name: str, tmp_path: Path) -> None:
    recorder = train(CASES[name], tmp_path, STEPS)
    check_same_findings(recorder)
    (history,) = recorder.histories()
    assert result_of(CASES[name], diagnose(history)) == "clean", str(diagnose(history))
    first, last = median_losses(history)
    assert last < first


def finding(name: str, severity: str) -> Finding:
    return Finding(name, severity, step=1, why="", next="")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("names", "hidden", "result"),
    [
        (["cause", "other"], False, "first"),
        (["other", "cause"], False, "among three"),
        (["other"], False, "wrong cause"),
        (["other"], True, "wrong cause"),
        ([], False, "missed"),
        ([], True, "not shown"),
    ],
)
def test_findings_are_compared_with_the_cause(names: list[str], hidden: bool, result: str) -> None:
    case = Case("name", "fault", "mlp", "custom loop", lambda recorder: None, ("cause",), hidden)
    assert result_of(case, Diagnosis([finding(name, "warning") for name in names])) == result


@pytest.mark.parametrize(("severity", "result"), [("info", "clean"), ("warning", "false alarm")])
def test_remarks_about_healthy_trainings_are_accepted(severity: str, result: str) -> None:
    case = Case("name", "healthy", "mlp", "custom loop", lambda recorder: None)
    assert result_of(case, Diagnosis([finding("other", severity)])) == result


def test_zoo_has_enough_cases() -> None:
    """The modules that need no Trainer alone have the promised number of faults and healthy trainings."""
    kinds = [case.kind for case in CASES.values() if case.build.__module__ in {module.__name__ for module in MODULES}]
    assert min(kinds.count("fault"), kinds.count("healthy")) >= 36


def test_table_has_every_case() -> None:
    text = DATA.read_text(encoding="utf-8")
    assert [name for name in CASES if f"`{name}`" not in text] == []


@pytest.mark.slow
@pytest.mark.trainer
@pytest.mark.process
def test_whole_zoo_trains_without_errors() -> None:
    done = subprocess.run([sys.executable, "-m", "tests.zoo"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
