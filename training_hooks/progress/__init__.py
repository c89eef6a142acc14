"""Hooks that report the progress of a run: loss, accuracy, spikes, phases."""

from .batch_rows import BatchRows
from .loss_spikes import LossSpikes
from .phases import Phases
from .training_diagnostics import TrainingDiagnostics
from .training_metrics import TrainingMetrics

__all__ = ["BatchRows", "LossSpikes", "Phases", "TrainingDiagnostics", "TrainingMetrics"]
