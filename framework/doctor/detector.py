"""Detectors: classes that look for one problem in the history of a run, and their registry."""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, get_args, overload

from ..errors import UsageError, listed
from ..hooks import Severity
from ..registry import Registry
from .findings import Evidence, Finding
from .history import History
from .measures import CHECKS
from .stages import Stage


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

    stage = "set-up"


class HooklessDetector(SetUpDetector):
    """Looks for such a mistake in what no hook measures: start-up facts, or numbers that a trainer reports."""

    needs = ()


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
