"""From options to a finished folder."""

from ..errors import require
from .checks import check_device
from .config import ExperimentConfig, RunFlags, RunOptions, alternatives, choices, field_names, in_words
from .records import (
    ATTACHED, CONFIG, SUMMARY, Completed, RunRecord, checked, differences, environment, read_ended, read_initial,
    read_status, run_folders, versions,
)
from .reference import load_reference
from .replay import Record, RecordSink, ReplaySink, pass_on
from .run_folder import EXPLANATION, REWINDS, RunFolder
from .runner import ExperimentRunner, GrokkingConfig, GrokkingRunner, OptionsByHook
from .task_building import build_run
from .session import Session, Setup
from .strategy_run import Display
from .summaries import summary_of
from .validating import DivergedError, Stretch

__all__ = [
    "ATTACHED",
    "CONFIG",
    "EXPLANATION",
    "REWINDS",
    "SUMMARY",
    "Completed",
    "Display",
    "DivergedError",
    "ExperimentConfig",
    "ExperimentRunner",
    "GrokkingConfig",
    "GrokkingRunner",
    "OptionsByHook",
    "Record",
    "RecordSink",
    "ReplaySink",
    "RunFlags",
    "RunFolder",
    "RunOptions",
    "RunRecord",
    "Session",
    "Setup",
    "Stretch",
    "alternatives",
    "build_run",
    "check_device",
    "checked",
    "choices",
    "differences",
    "environment",
    "field_names",
    "in_words",
    "load_reference",
    "pass_on",
    "read_ended",
    "read_initial",
    "read_status",
    "require",
    "run_folders",
    "summary_of",
    "versions",
]
