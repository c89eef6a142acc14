"""``loopscope doctor RUN --test``: laws and changes that are tried in a run that is trained again."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ..doctor import Diagnosis, Finding, ranked
from ..errors import LoopscopeError
from ..laboratory.questions import TrainAgain, try_changes
from ..runs import ATTACHED, RunRecord, StepRange, read_history, read_outcome
from .recorded_run import RecordedRun
from .user_errors import user_errors
from .watched_run import WatchedRun

LAW_STEPS = (1, 5)
"""The steps at which laws are tried."""
LAWS = "laws.json"
MOST_REPEATED = 500
"""Steps that are trained again for a law that waits for an evaluation of the run."""
NOT_REWOUND = (
    "A custom training loop cannot be rewound from its record; call scope.diagnose(test=True) while it trains."
)
PROVEN = 0.99
"""The confidence of a finding whose law is broken."""


def with_tests(folder: Path, diagnosis: Diagnosis, branches: int, steps: int, *, as_json: bool) -> Diagnosis:
    """Return the diagnosis with the laws and the changes that were tried in the rewound run."""
    by_law = [finding for finding in diagnosis.at_least("warning") if finding.law]
    with user_errors(full_traceback=False):
        if RunRecord.read(folder).experiment == ATTACHED:
            tested, train_again = replace(diagnosis, untested=[NOT_REWOUND]), partial(_train_script_again, folder)
        else:
            run = RecordedRun.read(folder)
            options: dict[str, Any] = {"branches": branches, "steps": steps, "left_out": [*run.record.treatments]}
            train_again = partial(run.train_again, is_silent=as_json)
            tested = try_changes(train_again, folder, diagnosis, read_history(folder), **options)
        if not by_law:
            return tested
        try:
            return _with_laws(tested, _try_laws(folder, by_law, train_again))
        except LoopscopeError as error:
            return replace(tested, untested=[*tested.untested, f"Laws were not tried: {error}"])


def _train_script_again(folder: Path, stretch: StepRange, hook: str, options: Mapping[str, Any]) -> Path:
    """Run the command of a watched run again with one hook, and return the folder of its record."""
    run = WatchedRun.read(folder)
    assert run is not None  # only the runs of experiments are none
    config = [f"{hook}.{name}={value}" for name, value in options.items()]
    return run.rewind(stretch, {"with_hooks": None, "hooks": [hook], "hook_config": config})[0]


def _try_laws(folder: Path, findings: Sequence[Finding], train_again: TrainAgain) -> dict[str, dict[str, Any]]:
    """Return the results of the laws of findings, by name, at the first steps of the run."""
    outcome = read_outcome(folder)
    latest = max(LAW_STEPS[-1], min(MOST_REPEATED, max(finding.step for finding in findings)))
    last = latest if outcome is None else max(1, min(latest, outcome["steps"]))
    options = {"only": sorted({finding.law for finding in findings}), "steps": [*LAW_STEPS]}
    path = train_again(StepRange(1, last, label="laws"), "laws", options)
    return {result["law"]: result for result in json.loads((path / LAWS).read_text(encoding="utf-8"))["laws"]}


def _with_laws(diagnosis: Diagnosis, results: Mapping[str, Mapping[str, Any]]) -> Diagnosis:
    """Return the diagnosis with what laws have shown: a finding whose law is broken is certain."""
    findings, tried = [], []
    for finding in diagnosis:
        if result := results.get(finding.law):
            verdict, evidence = result["verdict"], result.get("evidence", "")
            is_broken = verdict == "broken"
            text = f"{verdict} at step {result['step']}" if is_broken else verdict
            confidence = max(finding.confidence, PROVEN) if is_broken else finding.confidence
            finding = replace(finding, law_result=f"{text}: {evidence}" if evidence else text, confidence=confidence)
            tried.append(f"{finding.id} was not tested")
        findings.append(finding)
    untested = [sentence for sentence in diagnosis.untested if not sentence.startswith(tuple(tried))]
    return replace(diagnosis, findings=ranked(findings), untested=untested)
