"""The two questions to the laboratory: what caused a spike, and which change removes the problem of a finding."""

from ..explained_step import Explanation
from .explanation import explain
from .explanation_text import explanation_lines, row_table
from .repeated_steps import TrainAgain, rows_by_step
from .trial_plan import HOOK, TrialPlan, diagnosis_with_tests, try_changes

__all__ = [
    "HOOK", "Explanation", "TrainAgain", "TrialPlan", "diagnosis_with_tests", "explain", "explanation_lines",
    "row_table", "rows_by_step", "try_changes",
]
