"""The diagnosis of a run in progress: a sink that collects its history and reports new findings at their step."""

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from ..errors import RunNotice, notice, warn_at
from ..hooks import ENDLESS, Alert, HookPoint, MetricSink
from .diagnosis import diagnose
from .diagnosis_text import Diagnosis
from .findings import Finding
from .history import History
from .step_times import StepTimes

if TYPE_CHECKING:
    from ..hooks import RunInfo

ALWAYS_UNTIL = 10
"""Up to this step every delivery of metrics is diagnosed."""
GROWTH = 1.25
"""Factor between the steps of later diagnoses, so that their number grows with the logarithm of the steps."""
WAIT = 2.0
"""Factor between the step since which a finding that waits holds and the step at which it is reported."""
LEAST_WAIT = 20
"""Steps between both at least."""


CRITICAL = "critical "
"""The begin of the notice of a critical finding."""


class FindingNotice(RunNotice):
    """A new finding of severity warning or critical; displays show it as a warning."""


class LiveDiagnosis(MetricSink):
    """Collects the history of a run in memory, and reports new findings above ``info`` as warnings.

    It writes no file. Findings about the start-up facts are reported before the first step.
    """

    draws: ClassVar[bool] = False
    name = "diagnosis"
    keeps: ClassVar[bool] = False

    def __init__(self) -> None:
        self.history = History()
        self.has_critical = False
        """Whether a reported finding of the newest diagnosis is critical."""
        self._next_step = 0
        self._reported: dict[str, str] = {}  # the severity of each reported finding, by id
        self._first_seen: dict[str, int] = {}  # the step since which a finding has been in every diagnosis, by id
        self._refuted = set[str]()  # ids of reported findings that the last diagnosis did not contain

    @classmethod
    def file_names(cls, strategy: str) -> Sequence[str]:
        """Return no names: the diagnosis writes no files."""
        return ()

    def set_run_context(self, run: "RunInfo") -> None:
        """Start with an empty history of a run, and report what its start-up facts show."""
        self.history.planned_steps = None if run.steps >= ENDLESS else run.steps
        self._report()

    def position(self) -> dict[str, Any]:
        """Return the findings that have been reported."""
        return {"reported": dict(self._reported), "first_seen": dict(self._first_seen), "next_step": self._next_step}

    def resume(self, run: "RunInfo", position: Mapping[str, Any]) -> None:
        """Continue a run whose earlier history was loaded into :attr:`history`."""
        self._reported, self._next_step = dict(position["reported"]), int(position["next_step"])
        self._first_seen = dict(position.get("first_seen", {}))
        self.set_run_context(run)

    def emit(self, metrics: Mapping[str, Any], epoch: int, hook_point: HookPoint, *, step: int) -> None:
        """Add metrics, and diagnose them if it is time."""
        self.history.add(step, metrics, epoch)
        if step >= self._next_step or step <= ALWAYS_UNTIL:
            self._next_step = max(step + 1, int(step * GROWTH))
            self._report()

    def alert(self, alerts: Sequence[Alert]) -> None:
        """Add alerts, and diagnose at once."""
        for alert in alerts:
            self.history.add_alert(alert)
        self._report()

    def close(self, status: str) -> None:
        """Note the status of the run, and report which findings its end refutes."""
        self.history.status = status
        self._withdraw({finding.id: finding for finding in diagnose(self.history)}, at_once=True)

    def _report(self) -> None:
        findings = {finding.id: finding for finding in diagnose(self.history)}
        step, is_lost = self.history.step, self.history.loss.first_nonfinite is not None
        problems = [name for name, finding in findings.items() if finding.severity != "info"]
        self._first_seen = {name: self._first_seen.get(name, step) for name in problems}
        for name, first in self._first_seen.items():
            finding = findings[name]
            has_lasted = not finding.waits or is_lost or step >= max(first + LEAST_WAIT, WAIT * first)
            if has_lasted and self._reported.get(name) not in (finding.severity, "critical"):
                self._reported[name] = finding.severity
                report(finding)
        self.has_critical = any(findings[name].severity == "critical" for name in self._reported.keys() & findings)
        self._withdraw(findings)

    def has_critical_of(self, kind: str) -> bool:
        """Return whether there is a reported critical finding, of any ``kind`` (``critical``) or of this one."""
        return self.has_critical and (kind == "critical" or kind in self._reported)

    def _withdraw(self, findings: Mapping[str, Finding], *, at_once: bool = False) -> None:
        """Report that findings no longer hold: those of two diagnoses in a row, or those of the end of the run."""
        refuted = {name for name in self._reported if name not in findings or findings[name].severity == "info"}
        for name in sorted(refuted if at_once else refuted & self._refuted):
            del self._reported[name]
            reason = f" {findings[name].why}" if name in findings else ""
            notice(f"{name} is withdrawn at step {self.history.step:,}: the record no longer shows it.{reason}")
        self._refuted = refuted


def report(finding: Finding) -> None:
    """Issue a finding as a Python warning, which displays show as a line."""
    label = CRITICAL if finding.severity == "critical" else ""
    sentence = f"{label}{finding.id}, step {finding.step:,}: {finding.why} Next: {finding.next}"
    code = report.__code__
    warn_at(FindingNotice(sentence), code.co_filename, code.co_firstlineno)


def diagnosis_with(
    history: History, pending: Iterable[tuple[int, Mapping[str, Any]]], step_times: StepTimes | None = None
) -> Diagnosis:
    """Return the diagnosis of a history and of metrics that no sink has received yet; the history is not changed.

    Args:
        history: the metrics that sinks have received.
        pending: further metrics by full name, each with their step, oldest first.
        step_times: the time of a step up to now.
    """
    complete = replace(deepcopy(history), step_times=step_times)
    for step, metrics in pending:
        complete.add(step, metrics)
    return diagnose(complete)
