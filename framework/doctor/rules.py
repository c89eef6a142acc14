"""Rules: detectors that only compare one value of a record with a limit, as rows of attributes."""

from collections.abc import Iterable
from typing import ClassVar, NamedTuple

from ..hooks import Severity
from .detector import Detector
from .findings import Evidence, Finding
from .history import History


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
