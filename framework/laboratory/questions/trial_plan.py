"""Tests of findings: which are tested at which step by which changes, the branches, and the diagnosis with results."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ...checkpoints import checkpoints_by_moment
from ...doctor import Diagnosis, Finding, History, ranked
from ...errors import LoopscopeError, listed
from ...hooks import HookRegistry
from ...runs import DivergedError, RunFolder, StepRange
from ..changes import EVENTS, LEAD, SYMPTOMS, UNCHANGED, UNTESTABLE, TrialChange, changes_for
from ..effects import effect_of
from ..usual_values import RECENT, usual_norm
from ..verdict import ChangeTest, change_tests
from .repeated_steps import TrainAgain, measure

ODDS_FACTOR = 4.0
"""Factor by which a confirming test multiplies the odds of a finding's confidence, and a refuting one divides them."""
MOST_CONFIDENT = 0.99
MOST_REPEATED = 500
"""Steps that are trained again from the start of a run if no checkpoint precedes the branches."""
HOOK = "hypothesis_test"
"""The hook that trains the branches."""
MOST_KINDS = 10
"""Largest number of kinds of branches in a diagnosis, with those of the reference: 40 branches, 4 of each kind."""
FOLLOWING = 2
"""Steps of a branch after the step of an event."""


@dataclass
class TrialPlan:
    """Branches from one state of a training, which test some findings."""

    step: int
    """The first step of the branches, counted from 1; 0: from the present state."""
    event: int = 0
    """The position of the event's step in a branch, counted from 1; 0 without an event."""
    findings: list[Finding] = field(default_factory=list)
    changes: list[TrialChange] = field(default_factory=list)

    def options(self, history: History, branches: int, steps: int) -> dict[str, Any]:
        """Return the options of the hook; ``steps`` is the length of branches without an event."""
        names = ",".join(item.name for item in self.changes)
        count = self.event + FOLLOWING if self.event else steps
        options: dict[str, Any] = {"branches": branches, "changes": names, "event": self.event, "steps": count}
        last = self.step - 1 if self.step else history.step
        options["usual_norm"] = usual_norm(history.gradient_norms.between(last - RECENT + 1, last))
        return options | ({"step": self.step} if self.step else {})

    def kinds_with(self, changes: Iterable[TrialChange]) -> int:
        """Return the number of kinds of branches with further changes, also those of unchanged and restored ones.

        Those of an event are trained with ordinary batches as well.
        """
        return (4 if self.event else 2) + len({item.name for item in (*self.changes, *changes)})

    def add(self, finding: Finding, changes: Iterable[TrialChange]) -> None:
        """Add a finding with the changes that test it."""
        self.findings.append(finding)
        self.changes += [item for item in changes if item not in self.changes]


def trial_plans(diagnosis: Diagnosis, *, from_present: bool) -> tuple[list[TrialPlan], list[str]]:
    """Return the plans of the tests, and sentences about the findings that are not tested, except about remarks.

    Findings are tested in their order, until the number of branches is reached.

    Args:
        diagnosis: the findings.
        from_present: branches start from the present state; otherwise from the state before each finding's step.
    """
    plans: dict[tuple[int, int], TrialPlan] = {}
    untested = []
    for finding in diagnosis:
        step, event = (0, 0) if from_present else _place(finding)
        changes = [item for item in changes_for(finding.id) if event or not item.replaces_rows]
        if not changes and finding.severity == "info":
            continue
        if not changes:
            untested.append(_not_tested(finding, UNTESTABLE.get(finding.id, "no change in a few steps can test it")))
            continue
        plan = plans.get((step, event)) or TrialPlan(step, event)
        others = sum(item.kinds_with(()) for item in plans.values() if item is not plan)
        if others + plan.kinds_with(changes) > MOST_KINDS:
            untested.append(_not_tested(finding, "earlier findings use up all branches; resolve those first"))
            continue
        plan.add(finding, changes)
        plans[step, event] = plan
    return list(plans.values()), untested


def _place(finding: Finding) -> tuple[int, int]:
    """Return the first step of the branches that test a finding, and the position of its event in them."""
    step = max(1, finding.step)
    if finding.id not in EVENTS:
        return step, 0
    first = max(1, step - LEAD)
    return first, step - first + 1


def diagnosis_with_tests(
    diagnosis: Diagnosis,
    measure_plan: Callable[[TrialPlan], Mapping[str, Any] | str],
    *,
    from_present: bool,
    left_out: Sequence[str] = (),
) -> Diagnosis:
    """Return the diagnosis with tests of its findings, in the order of the new confidences.

    Args:
        diagnosis: the findings without tests.
        measure_plan: returns the measurements of the hook for a plan, or the reason why there are none.
        from_present: as in :func:`trial_plans`.
        left_out: names of the committing hooks of the run, which are disabled in the branches.
    """
    tests: dict[int, Sequence[ChangeTest]] = {}
    plans, sentences = trial_plans(diagnosis, from_present=from_present)
    for plan in plans:
        measured = measure_plan(plan)
        for finding in plan.findings:
            found = _tests_of(finding, plan, measured)
            if isinstance(found, str):
                sentences.append(_not_tested(finding, found))
                continue
            tests[id(finding)] = found
            if finding.id in EVENTS and all(item.of == "loss" for item in found):
                sentences.append(
                    f"{finding.id}: the loss does not rise by more than ordinary batches give by chance, so no test "
                    "can decide."
                )
    if tests and left_out:
        sentences.append(f"The branches of the tests ran without {listed([*left_out])}, unlike the run.")
    findings = [with_tests(item, tests[id(item)]) if id(item) in tests else item for item in diagnosis]
    return replace(diagnosis, findings=ranked(findings), untested=sentences)


def _tests_of(finding: Finding, plan: TrialPlan, measured: Mapping[str, Any] | str) -> Sequence[ChangeTest] | str:
    """Return the tests of a finding, or the reason why there are none."""
    if isinstance(measured, str):
        return measured
    if not math.isfinite(measured.get("level", math.nan)):
        return "the loss is not finite in the state before the branches"
    rises, scale = dict(measured["rise"]), float(measured["scale"])
    unchanged, ordinary = rises.pop(UNCHANGED.name), measured["ordinary"] if plan.event else None
    effects = {name: effect_of(unchanged, values, scale, ordinary) for name, values in rises.items()}
    changes = [item for item in plan.changes if finding.id in item.findings]
    tests = change_tests(changes, effects, of_event=finding.id in EVENTS)
    return tests or "the optimizer has no numeric learning rate"


def _not_tested(finding: Finding, reason: str) -> str:
    return f"{finding.id} was not tested: {reason}."


def with_tests(finding: Finding, tests: Sequence[ChangeTest]) -> Finding:
    """Return a finding with its tests, and with a confidence that takes them into account.

    A confirming test multiplies the odds by 4. If all tests refute the finding, its odds are divided by 4, unless it is
    a symptom: what was measured stays true, and only its cause is open.
    """
    confirms = [item.confirms for item in tests]
    odds = finding.confidence / (1 - min(finding.confidence, MOST_CONFIDENT))
    if any(confirms):
        odds *= ODDS_FACTOR
    elif confirms and not any(item is None for item in confirms) and finding.id not in SYMPTOMS:
        odds /= ODDS_FACTOR
    else:
        return replace(finding, tests=tests)
    confidence = odds / (1 + odds)
    return replace(finding, tests=tests, confidence=min(confidence, max(MOST_CONFIDENT, finding.confidence)))


def try_changes(
    train_again: TrainAgain,
    folder: Path,
    diagnosis: Diagnosis,
    history: History,
    *,
    branches: int,
    steps: int,
    left_out: Sequence[str] = (),
) -> Diagnosis:
    """Return the diagnosis of a run with tests of its findings, in the order of their new confidences.

    Args:
        train_again: trains a stretch of the run again.
        folder: the run's folder; the measurements are in its subfolder ``rewinds/hypotheses_step_N``.
        diagnosis: the findings.
        history: what the run has recorded.
        branches: number of unchanged branches, and of branches with each change.
        steps: number of steps of a branch.
        left_out: names of the run's committing hooks, which are disabled in the branches.

    Raises:
        UsageError: for a number of branches or steps that the hook does not accept.
    """

    def measure_plan(plan: TrialPlan) -> Mapping[str, Any] | str:
        options = plan.options(history, branches, steps)
        HookRegistry.get(HOOK)(**options)  # raises an error for wrong numbers before the run is trained again
        moments = checkpoints_by_moment(RunFolder(folder, folder.name).checkpoints)
        if plan.step - 1 > MOST_REPEATED and not any(saved < plan.step for _, saved in moments):
            return (
                f"the run has no checkpoint before step {plan.step:,}, and is too far from its start; train it with "
                "--save-checkpoints"
            )
        stretch = StepRange(plan.step, plan.step, label=f"hypotheses_step_{plan.step}")
        try:
            measured = measure(train_again, stretch, HOOK, options)
        except DivergedError as error:
            return f"the same program does not reproduce the run. {str(error).rstrip('.')}"
        except LoopscopeError as error:
            return f"the run cannot be repeated from there. {str(error).rstrip('.')}"
        return measured or f"the hook {HOOK!r} recorded nothing at step {plan.step:,}"

    return diagnosis_with_tests(diagnosis, measure_plan, from_present=False, left_out=left_out)
