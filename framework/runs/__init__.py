"""From options to a finished folder."""

from .config import ExperimentConfig, RunFlags, RunOptions, alternatives, choices, field_names, in_words, require
from .display import Display
from .records import CHECKPOINTS, CONFIG, weights_name
from .replay import RecordSink, ReplaySink, RunDescription, run_folders, status_of
from .runner import ExperimentRunner, GrokkingConfig, GrokkingRunner, OptionsByHook
from .session import Session, check_device

__all__ = [
    "CHECKPOINTS",
    "CONFIG",
    "Display",
    "ExperimentConfig",
    "ExperimentRunner",
    "GrokkingConfig",
    "GrokkingRunner",
    "OptionsByHook",
    "RecordSink",
    "ReplaySink",
    "RunDescription",
    "RunFlags",
    "RunOptions",
    "Session",
    "alternatives",
    "check_device",
    "choices",
    "field_names",
    "in_words",
    "require",
    "run_folders",
    "status_of",
    "weights_name",
]
