"""The outcome of a case: its findings, and whether the cause is among them."""

import os
import random
import shutil
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from loopscope.doctor import Diagnosis, Finding, History, diagnose
from loopscope.runs import read_history

from tests.zoo.case import CASES, Case
from tests.zoo.recorder import Recorder

Result = Literal["first", "among three", "later", "missed", "wrong cause", "not shown", "clean", "false alarm", "error"]
DATA = Path(__file__).parents[2] / "docs" / "data" / "zoo.txt"
"""The file with the outcomes of all cases."""
SHOWN = 3
"""Findings in the table of a case."""
LOSSES = ("training_checks/loss", "training_metrics/loss")
"""Metrics with the loss, that of every step first."""
GLANCES = (0, 1, 2, 3, 5, 10, 20, 30, 50, 75, 100, 150, 200, 300, 400)
"""Steps up to which a record is read, to determine when the cause was first a finding."""


@dataclass(frozen=True)
class Outcome:
    """What the doctor reports about a case."""

    name: str
    result: Result
    findings: tuple[tuple[str, str], ...] = ()
    """Severity and id of every finding, most important first."""
    first_step: int | None = None
    """The last step that was read when the cause was first a finding; ``None`` if it never is."""
    losses: tuple[float, float] = (float("nan"), float("nan"))
    """Median losses of the first and the last tenth of the steps."""
    steps: int = 0
    seconds: float = 0.0
    error: str = ""

    @property
    def case(self) -> Case:
        """The case that was trained."""
        return CASES[self.name]

    @property
    def is_accepted(self) -> bool:
        """Whether the first finding is the cause, or a healthy training has no warning."""
        return self.result in ("first", "clean") or (self.case.hidden and self.result in ("among three", "not shown"))

    @property
    def delay(self) -> int | None:
        """Steps from the first one at which the cause could be known to the finding."""
        return None if self.first_step is None else max(0, self.first_step - self.case.knowable)


def train(case: Case, folder: Path, most_batches: int | None = None, *, unedited: bool = False) -> Recorder:
    """Train a case with its hooks in a folder, from fixed seeds and default settings."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    recorder = Recorder(folder, case.group, most_batches, unedited=unedited)
    case.build(recorder)
    return recorder


def outcome_of(name: str, keep: Path | None = None, *, unedited: bool = False) -> Outcome:
    """Train a case and return its outcome; an exception becomes an outcome with its text.

    Args:
        name: the name of the case.
        keep: a folder for the records, which is kept; by default a temporary one.
        unedited: let custom loops make no call of their scope.
    """
    os.environ.setdefault("TQDM_DISABLE", "1")
    import_module("tests.zoo.table")
    case, started = CASES[name], time.process_time()
    try:
        with warnings.catch_warnings(), tempfile.TemporaryDirectory() as temporary:
            warnings.simplefilter("ignore")  # notices about the planted faults
            folder = Path(temporary) if keep is None else keep / name
            if keep is not None:
                shutil.rmtree(folder, ignore_errors=True)
            recorder = train(case, folder, unedited=unedited)
            check_same_findings(recorder)
            outcome = judged(case, recorder, time.process_time() - started)
        check_healthy_loss(outcome)
        return outcome
    except Exception as error:
        return Outcome(name, "error", error=f"{type(error).__name__}: {error}")


def recorded_outcome(name: str, records: Path) -> Outcome:
    """Return the outcome of a case from the records of an earlier training, with the present detectors."""
    import_module("tests.zoo.table")
    case, recorder = CASES[name], Recorder(records / name)
    recorder.runs = sorted(path.parent for path in recorder.folder.rglob("summary.json"))
    if not recorder.runs:
        return Outcome(name, "error", error=f"{recorder.folder} has no record; train the case with --keep {records}")
    return judged(case, recorder, 0.0)


def check_same_findings(recorder: Recorder) -> None:
    """Raise an AssertionError if the scope and the record of a training have other findings."""
    for from_record, from_scope in zip(recorder.diagnoses(), recorder.scope_diagnoses(), strict=False):
        read, live = [[finding.id for finding in item] for item in (from_record, from_scope)]
        assert read == live, f"the record has the findings {read}, but scope.diagnose() has {live}"


def check_healthy_loss(outcome: Outcome) -> None:
    """Raise an AssertionError if the loss of a healthy training does not fall by a tenth."""
    first, last = outcome.losses
    if outcome.case.kind == "healthy" and outcome.case.falls:
        assert last < first - 0.1 * abs(first), (
            f"the loss of a healthy training does not fall: {first:.4g} to {last:.4g}"
        )


def judged(case: Case, recorder: Recorder, seconds: float) -> Outcome:
    """Return the outcome of a training; of several scopes, that of the one with the most important findings."""
    diagnoses = recorder.diagnoses()
    worst = max(range(len(diagnoses)), key=lambda index: len(diagnoses[index].at_least("warning")))
    diagnosis, folder = diagnoses[worst], recorder.runs[worst]
    history = read_history(folder)
    return Outcome(
        case.name,
        result_of(case, diagnosis),
        tuple((finding.severity, finding.id) for finding in diagnosis),
        first_step(case, folder, history.step),
        median_losses(history),
        history.step,
        seconds,
    )


def result_of(case: Case, diagnosis: Diagnosis) -> Result:
    """Compare the findings with the planted cause."""
    serious = diagnosis.at_least("warning")
    if case.kind == "healthy":
        return "false alarm" if serious else "clean"
    places = [place for place, finding in enumerate(diagnosis) if is_cause(case, finding)]
    if not places:
        return "wrong cause" if serious else "not shown" if case.hidden else "missed"
    if places[0] == 0:
        return "first"
    return "among three" if places[0] < SHOWN else "later"


def first_step(case: Case, folder: Path, steps: int) -> int | None:
    """Return the smallest glance at the record at which the cause is a finding."""
    knowable = [case.knowable, case.knowable + 1]
    for step in sorted({*GLANCES, *knowable, steps}):
        if step >= case.knowable and any(is_cause(case, finding) for finding in diagnose(read_history(folder, step))):
            return step
    return None


def is_cause(case: Case, finding: Finding) -> bool:
    """Return whether a finding names the planted cause."""
    return finding.id in case.expected and case.mentions in str(finding.as_dict())


def median_losses(history: History) -> tuple[float, float]:
    """Return the median losses of the first and the last tenth of the steps; NaN without a recorded loss."""
    values: Sequence[float] = max((history.curve(name).values.tolist() for name in LOSSES), key=len)
    tenth = max(1, len(values) // 10)
    if not values:
        return float("nan"), float("nan")
    return float(np.median(values[:tenth])), float(np.median(values[-tenth:]))
