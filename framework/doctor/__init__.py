"""The doctor: findings about a training, from its start-up facts, its metrics and its alerts."""

from ..hooks import SEVERITIES, Severity
from .change_tests import ChangeTest
from .detector import Detector, DetectorRegistry, Threshold
from .diagnosis import all_detectors, diagnose
from .diagnosis_text import Diagnosis, brief_lines, diagnosis_lines, evidence_text, finding_lines
from .effects import LARGEST_RISE, Effect, effect_of
from .findings import SCHEMA, Evidence, Finding
from .history import Curve, History
from .hypotheses import HYPOTHESES, Hypothesis
from .live import CRITICAL, FindingNotice, LiveDiagnosis, diagnosis_with
from .recent_losses import RecentLosses
from .start_up_facts import start_facts
from .trial_plan import HOOK, TrialPlan, diagnosis_with_tests, trial_plans

__all__ = [
    "CRITICAL",
    "HOOK",
    "HYPOTHESES",
    "LARGEST_RISE",
    "SCHEMA",
    "SEVERITIES",
    "ChangeTest",
    "Curve",
    "Detector",
    "DetectorRegistry",
    "Diagnosis",
    "Effect",
    "Evidence",
    "Finding",
    "FindingNotice",
    "History",
    "Hypothesis",
    "LiveDiagnosis",
    "RecentLosses",
    "Severity",
    "Threshold",
    "TrialPlan",
    "all_detectors",
    "brief_lines",
    "diagnose",
    "diagnosis_lines",
    "diagnosis_with",
    "diagnosis_with_tests",
    "effect_of",
    "evidence_text",
    "finding_lines",
    "start_facts",
    "trial_plans",
]
