"""The doctor: findings about a training, from its start-up facts, its metrics and its alerts."""

from ..hooks import SEVERITIES, Severity
from .detector import Detector, DetectorRegistry, Threshold
from .diagnosis import all_detectors, diagnose
from .diagnosis_text import brief_lines, diagnosis_lines, evidence_text, finding_lines
from .findings import SCHEMA, Diagnosis, Evidence, Finding
from .history import Curve, History
from .live import FindingNotice, LiveDiagnosis, diagnosis_with
from .start_up_facts import start_facts

__all__ = [
    "SCHEMA", "SEVERITIES", "Curve", "Detector", "DetectorRegistry", "Diagnosis", "Evidence", "Finding",
    "FindingNotice", "History", "LiveDiagnosis", "Severity", "Threshold", "all_detectors", "brief_lines", "diagnose",
    "diagnosis_lines", "diagnosis_with", "evidence_text", "finding_lines", "start_facts",
]
