"""The diagnosis of a history by all registered detectors."""

from collections.abc import Iterable
from dataclasses import replace
from importlib import import_module

import numpy as np

from ..errors import RunNotice, describe_error, library_warnings_ignored, listed, warn
from .detector import Detector, DetectorRegistry
from .diagnosis_text import Diagnosis
from .findings import Finding, ranked, with_causes
from .history import History
from .measures import CHECKS, LEARNED, learned_share
from .policy_numbers import PolicyNumbers, course_of, rise_of

THINNING = "budget/thinning"
"""The family of metrics with the factor by which a budget has thinned the schedule of each hook."""
_FAILED = (" cannot run: ", " raised at ")
"""Parts of the reason of a hook that was left out because it failed, and not because it does not suit the training."""


def diagnose(history: History) -> Diagnosis:
    """Return the findings of all registered detectors about a history, most important first.

    A detector that raises is left out with a warning, so that a broken one never hides the findings of others.
    """
    findings = [with_spacing(item, history) for detector in all_detectors() for item in _findings_of(detector, history)]
    not_checked = _not_checked(history)
    missing, unchecked = [*not_checked, *_missing(history)], " ".join(not_checked)
    return Diagnosis(with_causes(ranked(findings)), missing, unchecked=unchecked, course=course_of(history))


def all_detectors() -> list[Detector]:
    """Return an object of every registered detector, by name."""
    import_module("loopscope.doctor.detectors")  # registers the shipped ones
    return [detector() for detector in DetectorRegistry]


def _findings_of(detector: Detector, history: History) -> Iterable[Finding]:
    try:
        # Metrics may be infinite or NaN, about which NumPy warns in nearly every operation.
        with np.errstate(all="ignore"), library_warnings_ignored():
            findings = detector.detect(history)
            return [lowered(item, history) for item in findings] if detector.yields_to_learning else list(findings)
    except Exception as error:
        warn(f"The detector {detector.name!r} failed and is left out: {describe_error(error)}", RunNotice)
        return []


def has_failed(reason: str) -> bool:
    """Return whether a hook was left out because it failed."""
    return any(part in reason for part in _FAILED)


def lowered(finding: Finding, history: History) -> Finding:
    """Return a finding about harm to a training: a remark if its loss has fallen far, no critical one if by half.

    The loss of a policy does not show what it has learned; its reward does.
    """
    reward = PolicyNumbers(history).curve("reward")
    if finding.severity != "info" and rise_of(reward) > 0:
        risen = f" The reward has since risen, to {reward.end_level():.3g}."
        return replace(finding, severity="info", why=finding.why + risen)
    fall = learned_share(history)
    since = f" The loss has since fallen, to {history.loss.end_level():.3g}."
    if finding.severity != "info" and fall > LEARNED:
        return replace(finding, severity="info", why=finding.why + since)
    if finding.severity == "critical" and fall > 0.5:
        return replace(finding, severity="warning", why=finding.why + since)
    return finding


def with_spacing(finding: Finding, history: History) -> Finding:
    """Return a finding that names the steps between two looks if a budget had thinned the schedule of its metric."""
    metrics = [item.metric for item in finding.evidence if item.metric in history.curves]
    if not finding.step or not metrics:
        return finding
    factor = history.curve(f"{THINNING}/{metrics[0].partition('/')[0]}").at(finding.step)
    earlier = history.curve(metrics[0]).steps
    earlier = earlier[earlier < finding.step]
    if not factor > 1 or not len(earlier):
        return finding
    every = finding.step - int(earlier[-1])
    if every < 2:  # the loss is recorded at every step
        return finding
    first_seen = f" First seen at step {finding.step:,} (measured every {every:,} steps)."
    return replace(finding, why=finding.why + first_seen)


def _not_checked(history: History) -> list[str]:
    """Return sentences about checks that the record does not allow, and what to add; empty if all were made."""
    needed = {name for detector in all_detectors() for name in detector.needs}
    recorded = {name.partition("/")[0] for name in history.curves}
    reasons = {name: reason for name, reason in history.left_out.items() if name in needed}
    sentences = []
    if absent := sorted(needed - recorded - set(history.hooks) - reasons.keys()):
        advice = "run with the group 'health' of hooks for a complete diagnosis"
        sentences.append(f"The record has no {listed(absent)}; {advice}.")
    failed = filter(has_failed, reasons.values())
    sentences += [f"The diagnosis is incomplete: {reason.rstrip('.')}." for reason in failed]
    if CHECKS in reasons and not has_failed(reasons[CHECKS]):
        sentences.append(f"The data, the loss and the gradients were not checked: {reasons[CHECKS].rstrip('.')}.")
    if not len(history.loss) and (history.is_over or history.step):
        sentences.append("No step with a loss was recorded, so hardly anything could be checked.")
    return sentences


def _has_no_rows(history: History) -> bool:
    """Return whether steps were checked, but no rows of their batches."""
    names = ("input_mean", "duplicate_row_fraction", "repeated_row_fraction")
    is_checked = f"{CHECKS}/without_gradient_count" in history.curves
    return is_checked and not any(f"{CHECKS}/{name}" in history.curves for name in names)


def _missing(history: History) -> list[str]:
    """Return sentences about what was not checked for another reason than a missing measurement."""
    needed = {name for detector in all_detectors() for name in detector.needs} - {CHECKS}
    reasons = [reason for name, reason in history.left_out.items() if name in needed and not has_failed(reason)]
    sentences = [f"Not checked: {reason.rstrip('.')}." for reason in reasons]
    if _has_no_rows(history):
        sentences.append("Not checked: inputs, targets and masks, since the batches have no tensors on the CPU.")
    if not history.is_over and history.curves:
        sentences.append("The training is in progress; some findings, such as no-better-than-uniform, need its end.")
    return sentences
