"""The doctor's readings of a training in progress: the graph of its loss, and the modes of its evaluations."""

from .backward_passes import BackwardPass
from .backward_recorder import BackwardRecorder
from .evaluation_dropout import EvaluationDropout
from .evaluation_modes import EvaluationModes
from .loss_graph import last_divisor

__all__ = ["BackwardPass", "BackwardRecorder", "EvaluationDropout", "EvaluationModes", "last_divisor"]
