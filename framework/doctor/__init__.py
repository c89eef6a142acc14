"""The doctor: findings about a training, from its start-up facts, its metrics and its alerts."""

from typing import TYPE_CHECKING

from ..names_on_demand import names_on_demand

if TYPE_CHECKING:
    from ..hooks import SEVERITIES, Severity
    from .detector import Detector, DetectorRegistry, Rule, Threshold
    from .diagnosis import all_detectors, diagnose
    from .diagnosis_text import Diagnosis, brief_lines, diagnosis_lines, evidence_text, finding_lines
    from .findings import SCHEMA, Evidence, Finding, ranked
    from .history import Curve, History, RecentLosses, series_in
    from .live import CRITICAL, FindingNotice, LiveDiagnosis, diagnosis_with
    from .policy_numbers import COURSE, by_common_name
    from .start_up_facts import start_facts
    from .step_times import WORDS, StepTimes, milliseconds_text, memory_text
else:
    __getattr__ = names_on_demand(__name__)

__all__ = [
    "COURSE", "CRITICAL", "SCHEMA", "SEVERITIES", "WORDS", "Curve", "Detector", "DetectorRegistry", "Diagnosis",
    "Evidence", "Finding", "FindingNotice", "History", "LiveDiagnosis", "RecentLosses", "Rule", "Severity", "StepTimes",
    "Threshold", "all_detectors", "brief_lines", "by_common_name", "diagnose", "diagnosis_lines", "diagnosis_with",
    "evidence_text", "finding_lines", "memory_text", "milliseconds_text", "ranked", "series_in", "start_facts",
]
