"""Findings of a diagnosis: what is wrong in a training, how certain that is, and what to do next."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ..errors import UsageError
from ..hooks import LARGEST_STEP, SEVERITIES, Severity
from ..laboratory import ChangeTest

SCHEMA = 1
"""Version of the JSON of a diagnosis; it changes when a field is renamed or removed."""
Stage = Literal[
    "", "set-up", "activations", "gradients", "updates", "nonfinite", "outputs", "loss", "evaluation", "validation"
]
"""Where in the course of causes and effects a finding belongs.

- ``set-up``: the data, the formula of the loss, the initial weights, the model, the loop, the optimizer, the schedule.
- ``activations``, ``gradients``, ``updates``, ``nonfinite``: what a step computes, in its order.
- ``outputs``, ``loss``: what comes of many steps.
- ``evaluation``: mistakes with which the steps work, but not what is evaluated, such as repeated rows or a wrong mode.
- ``validation``: the numbers of an evaluation.

A finding without a stage explains no other one, and is explained by none.
"""
IN_STEP: tuple[Stage, ...] = ("activations", "gradients", "updates", "nonfinite")
EFFECTS: tuple[Stage, ...] = (*IN_STEP, "outputs", "loss", "validation")
"""The stages that are consequences of earlier ones; all others are decisions of the script, which have no cause."""
EXCEPTIONS: Mapping[str, frozenset[str]] = {
    # The second is another reading of the same decision.
    "class-never-a-target": frozenset({"padding-in-loss"}),
    "constant-initial-weights": frozenset({"initial-weights-scale"}),
    "cosine-schedule-rises": frozenset({"schedule-ends-early"}),
    "gradients-zeroed-too-early": frozenset({"weight-decay-too-large"}),
    "inputs-constant": frozenset({"rows-repeated"}),
    "model-in-eval-mode": frozenset({"batchnorm-frozen"}),
    "optimizer-not-stepped": frozenset({"gradients-not-zeroed"}),
    "same-batch-at-every-step": frozenset({"rows-repeated"}),
    "schedule-ends-early": frozenset({"learning-rate-zero"}),
    "targets-are-inputs": frozenset({"causal-mask-missing"}),
    "targets-extreme": frozenset({"targets-not-normalised"}),
    "targets-ignored": frozenset({"data-sorted-by-class"}),
    "targets-not-probabilities": frozenset({"targets-extreme"}),
    "targets-out-of-reach": frozenset({"inputs-not-normalised", "targets-not-normalised"}),
    "warm-up-too-long": frozenset({"learning-rate-zero"}),
    # A consequence of an earlier stage, or of the same one.
    "causal-mask-missing": frozenset({"learning-rate-too-low"}),  # the loss is low, and so are the gradients
    "gradient-jump": frozenset({"exploding-gradients"}),
    "learning-rate-too-high": frozenset({"vanishing-gradients"}),  # whose step is that of its first check
    "loss-constant": frozenset({"outputs-ignore-inputs"}),
    "no-better-than-frequencies": frozenset({"loss-not-falling"}),
    "no-better-than-mean": frozenset({"loss-not-falling"}),
    "no-better-than-uniform": frozenset({"loss-not-falling"}),
    "nonfinite": frozenset({"weight-decay-too-large"}),  # weights that are NaN have no norm
}
"""Ids of findings that a finding explains, too, by its id; these never explain it."""


@dataclass(frozen=True)
class Evidence:
    """A measured value behind a finding.

    Args:
        metric: the full name of the metric, or of a start-up fact.
        value: the measured value.
        limit: the value beyond which it counts, if there is one.
        usual: the usual values, in words.
    """

    metric: str
    value: Any
    limit: float | None = None
    usual: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return the evidence as plain values, without empty fields."""
        return {name: value for name, value in vars(self).items() if value not in (None, "")}


@dataclass(frozen=True)
class Finding:
    """A problem of a training, or a property that deserves attention.

    Args:
        id: the name of the detector.
        severity: ``critical``: the training cannot succeed; ``warning``: it is probably worse than it could be;
            ``info``: a property that healthy runs may have.
        step: the first step at which the problem is visible; 0 before the first step.
        why: what is wrong, and why it matters, in one sentence.
        next: one command or one line of code.
        evidence: the values behind the finding.
        confidence: the probability that ``why`` is right, between 0 and 1.
        stage: the causal stage of the problem; findings of later stages may be consequences, if they start no earlier.
        tests: the changes that were tried in branches of the training, with their effects.
        waits: whether later steps may refute the finding, so that a running training reports it once it has lasted.
        law: the law of ``loopscope check`` of which the problem is a counterexample, or an empty string.
        law_result: what the law has shown in this training, in words, once it was tried.
    """

    id: str
    severity: Severity
    step: int
    why: str
    next: str
    evidence: Sequence[Evidence] = ()
    confidence: float = 0.9
    stage: Stage = field(default="", compare=False)
    tests: Sequence[ChangeTest] = ()
    waits: bool = field(default=False, compare=False)
    law: str = ""
    law_result: str = ""

    @property
    def when(self) -> str:
        """From when on the problem is visible, in words."""
        return f"from step {self.step:,}" if self.step else "before the first step"

    def as_dict(self) -> dict[str, Any]:
        """Return the finding as plain values, as in the JSON of a diagnosis."""
        names = ("id", "severity", "step", "evidence", "why", "next", "confidence")
        content = {name: getattr(self, name) for name in names}
        content |= {"evidence": [item.as_dict() for item in self.evidence], "confidence": round(self.confidence, 2)}
        optional = {"tests": [item.as_dict() for item in self.tests], "law": self.law, "law_result": self.law_result}
        return content | {name: value for name, value in optional.items() if value}

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> "Finding":
        """Return the finding that :meth:`as_dict` described.

        Raises:
            UsageError: for content without the required fields.
        """
        try:
            evidence = [Evidence(**item) for item in content["evidence"]]
            tests = [ChangeTest(**item) for item in content.get("tests", ())]
            names = ("id", "severity", "step", "why", "next", "confidence")
            fields = {name: content[name] for name in names}
            fields |= {name: content[name] for name in ("law", "law_result") if name in content}
            texts = [value for name, value in fields.items() if name not in ("severity", "step", "confidence")]
            texts += [item.metric for item in evidence]
            if not all(isinstance(text, str) for text in texts) or fields["severity"] not in SEVERITIES:
                raise TypeError("a text or the severity is invalid")
            if type(fields["step"]) is not int or not 0 <= fields["step"] < LARGEST_STEP:
                raise TypeError("its step is no step")
            fields["confidence"] = float(fields["confidence"])
            if not all(isinstance(item.limit, (int, float, type(None))) for item in evidence):
                raise TypeError("a limit is no number")
            for test in tests:
                test.as_dict(), test.sentence
            return cls(**fields, evidence=evidence, tests=tests)
        except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise UsageError(f"{content!r} is not a finding of a diagnosis: {error}.") from error


def ranked(findings: Iterable[Finding]) -> list[Finding]:
    """Return the findings, most important first; consequences follow their causes.

    Remarks of severity ``info`` come last, and causes before their consequences; then the order is by severity,
    confidence and first step.
    """
    all_findings = list(findings)
    return sorted(
        all_findings,
        key=lambda finding: (
            finding.severity == "info",
            _cause_of(finding, all_findings) is not None,
            -SEVERITIES.index(finding.severity),
            -finding.confidence,
            finding.step,
            finding.id,
        ),
    )


def with_causes(findings: Sequence[Finding]) -> list[Finding]:
    """Return findings in which consequences point to their causes, instead of what else they suggest to do."""
    return [
        finding
        if (cause := _cause_of(finding, findings)) is None
        else replace(finding, next=f"Repair {cause.id} first: this is probably its consequence.")
        for finding in findings
    ]


def _cause_of(finding: Finding, findings: Iterable[Finding]) -> Finding | None:
    """Return another finding, of at least the severity ``warning`` and no later, that explains this one."""
    return next((other for other in findings if other is not finding and _explains(other, finding)), None)


def _explains(cause: Finding, finding: Finding) -> bool:
    if cause.step > finding.step or cause.severity == "info" or cause.id in EXCEPTIONS.get(finding.id, ()):
        return False
    is_exception = finding.id in EXCEPTIONS.get(cause.id, ())
    return is_exception or precedes(cause.stage, finding.stage, same_step=cause.step == finding.step)


def precedes(cause: Stage, effect: Stage, *, same_step: bool) -> bool:
    """Return whether a problem of one stage may cause another, at the same step or at a later one.

    >>> precedes("gradients", "updates", same_step=True), precedes("updates", "gradients", same_step=True)
    (True, False)
    >>> precedes("updates", "gradients", same_step=False)  # a bad update spoils the gradients of later steps
    True
    >>> precedes("evaluation", "validation", same_step=True), precedes("evaluation", "loss", same_step=False)
    (True, False)
    """
    if not cause or effect not in EFFECTS:
        return False
    if cause not in EFFECTS:
        return cause == "set-up" or effect == "validation"
    if EFFECTS.index(cause) < EFFECTS.index(effect):
        return True
    return not same_step and cause in IN_STEP and effect in IN_STEP
