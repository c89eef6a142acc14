"""Detectors: classes that look for one problem in the history of a run, rules among them, and their registry."""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, get_args, overload

from ..errors import UsageError, listed
from ..hooks import Severity
from ..registry import Registry
from .findings import Evidence, Finding, Stage
from .history import History
from .measures import CHECKS


@dataclass(frozen=True)
class Threshold:
    """A limit of a detector with the reason for its value, as an attribute of the class: objects see the value."""

    value: float
    reason: str

    @overload
    def __get__(self, detector: None, owner: type[Any]) -> "Threshold": ...
    @overload
    def __get__(self, detector: object, owner: type[Any]) -> float: ...
    def __get__(self, detector: object, owner: type[Any]) -> "Threshold | float":
        return self if detector is None else self.value


class Detector(ABC):
    """Looks for one problem in the history of a run.

    A detector draws no random numbers and changes nothing: the same history gives the same findings, while the run is
    in progress and afterwards. It returns no finding if the record lacks what it needs.

    The docstring of a shipped detector is its text on the page about troubleshooting: what it finds, after ``Symptom:``
    what a user sees, the causes and the remedy in one to three sentences, and two optional paragraphs. ``Applies to:``
    names the optimizers and the phase of the training, and ``Source:`` the paper, documentation or measurement behind
    the rule.
    """

    name: ClassVar[str]
    """Id of the findings: words joined by hyphens."""
    needs: ClassVar[tuple[str, ...]] = (CHECKS,)
    """Names of the hooks whose metrics the detector reads; empty for start-up facts."""
    stage: ClassVar[Stage] = ""
    """The causal stage of the problem; findings of later stages may be its consequences (:data:`.Stage`)."""
    law: ClassVar[str] = ""
    """The law of ``loopscope check`` of which the problem is a counterexample, if there is one."""
    waits: ClassVar[bool] = False
    """Whether the finding is about the course of the training, so that later steps may refute it.

    While the training runs, such a finding is reported once it has lasted.
    """
    yields_to_learning: ClassVar[bool] = False
    """Whether the finding claims that the model learns badly, so that it is a remark where the loss shows otherwise."""

    @abstractmethod
    def detect(self, history: History) -> Iterable[Finding]:
        """Return the findings about a history, usually none or one."""

    @classmethod
    def thresholds(cls) -> dict[str, Threshold]:
        """Return the limits of the detector by name."""
        return {name: item for name, item in vars(cls).items() if isinstance(item, Threshold)}

    def finding(
        self, severity: Severity, step: int, why: str, next_step: str, *evidence: Evidence, confidence: float = 0.9
    ) -> Finding:
        """Return a finding of this detector."""
        waits = self.waits or self.yields_to_learning
        return Finding(self.name, severity, step, why, next_step, evidence, confidence, self.stage, (), waits, self.law)


class SetUpDetector(Detector):
    """Looks for a mistake in what the script decides: its data, loss, model, loop, optimizer or schedule."""

    stage: ClassVar[Stage] = "set-up"


class HooklessDetector(SetUpDetector):
    """Looks for such a mistake in what no hook measures: start-up facts, or numbers that a trainer reports."""

    needs = ()


class RuleValue(NamedTuple):
    """A value of a record, and the first step at which it is visible."""

    value: float
    step: int


def flag(history: History, metric: str) -> RuleValue:
    """Return 1 if the newest check found a property, else 0, from the first check on."""
    curve = history.curve(metric)
    return RuleValue(int(curve.last > 0), curve.first_step)


def count(history: History, metric: str) -> RuleValue:
    """Return the newest count, from the first step on at which it was above 0."""
    curve = history.curve(metric)
    return RuleValue(curve.last, curve.first_step_where(curve.values > 0) or curve.last_step)


def median(history: History, metric: str) -> RuleValue:
    """Return the median over all checks, from the first step on."""
    return RuleValue(history.curve(metric).median, 1)


def fact(history: History, name: str) -> RuleValue:
    """Return a start-up fact, ``facts/NAME``, that is a number; 0 if it is unknown."""
    return RuleValue(history.facts.get(name.removeprefix("facts/")) or 0, 0)


def alert(history: History, name: str) -> RuleValue:
    """Return 1, at the step of the first one, if there are alerts ``HOOK/CONDITION``, else 0."""
    alerts = history.alerts_of(*name.split("/"))
    return RuleValue(1, int(alerts[0]["step"] or 0)) if alerts else RuleValue(0, 0)


class Rule(Detector):
    """Finds a value of the record that is above a limit; subclasses are rows of attributes, without methods."""

    read: ClassVar["staticmethod[[History, str], RuleValue]"] = staticmethod(flag)
    """The function that reads the value, by the name of the metric."""
    metric: ClassVar[str]
    """The full name of the value, which evidence shows."""
    above: ClassVar[str] = ""
    """The name of the threshold above which the value is a finding; the limit is 0 without one."""
    severity: ClassVar[Severity] = "warning"
    why: ClassVar[str]
    """The sentence of the finding; ``{value}`` and ``{step}`` stand for what was read."""
    remedy: ClassVar[str]
    usual: ClassVar[str] = "0"
    """The usual values, in words."""
    confidence: ClassVar[float] = 0.9

    def detect(self, history: History) -> Iterable[Finding]:
        """Return a finding if the value is above the limit."""
        value, step = type(self).read(history, self.metric)
        limit = getattr(self, self.above) if self.above else 0
        if value > limit:
            evidence = Evidence(self.metric, value, limit, self.usual)
            why = self.why.format(value=value, step=step)
            yield self.finding(self.severity, step, why, self.remedy, evidence, confidence=self.confidence)


def check_detector(detector: type[Any]) -> None:
    """Raise :class:`UsageError` for a class that is not a complete detector."""
    if not (isinstance(detector, type) and issubclass(detector, Detector)):
        raise UsageError(f"{detector!r} is not a detector; derive a class from loopscope.doctor.Detector.")
    if not isinstance(getattr(detector, "name", None), str):
        raise UsageError(f"Detector {detector.__name__} has no name; set it to a text in the class.")
    if detector.stage not in (stages := get_args(Stage)):
        choices = listed([repr(stage) for stage in stages], len(stages))
        raise UsageError(f"Detector {detector.__name__} has the stage {detector.stage!r}; choose one of {choices}.")
    if inspect.isabstract(detector):
        raise UsageError(f"Detector {detector.__name__} has no method detect(self, history); define it.")


DetectorRegistry: Registry[type[Detector]] = Registry("detector", "loopscope.detectors", check_detector, Detector)
