"""Laws that every training obeys, tried on its first steps: the recording of a step, trials, and the laws."""

from .law import Law, LawRegistry, Outcome, broken, holds, not_checked
from .lost_optimizer import report_lost_optimizer
from .recording import Recording
from .session import LawCheck
from .trial import Evaluation, Trial, distance

__all__ = [
    "Evaluation",
    "Law",
    "LawCheck",
    "LawRegistry",
    "Outcome",
    "Recording",
    "Trial",
    "broken",
    "distance",
    "holds",
    "not_checked",
    "report_lost_optimizer",
]
