"""Runs of experiments: options, records, the training session, resuming, and the folder of results."""

from typing import TYPE_CHECKING

from ..names_on_demand import names_on_demand

if TYPE_CHECKING:
    from ..errors import require
    from .budgets import read_decisions
    from .checks import check_device
    from .provenance import read_provenance, script_digest
    from .config import (
        ExperimentConfig, RunFlags, RunOptions, RunSettings, allowed_words, budget_of, describe_type, field_names, fits,
        union_members,
    )
    from .file_manifest import ALL, READ, SETTINGS, changed_files, changes_text, warn_of_changes
    from .records import (
        ATTACHED, ATTACHED_RUNS, CONFIG, EXPLANATION, INCOMPLETE, REWINDS, SUMMARY, TRAINED, Completed, FailedSink,
        RunRecord, checked_fields, differences, is_file_name, read_initial, read_last_step, read_outcome, read_status,
        run_folders, run_name,
    )
    from .reference import load_reference
    from .replay import Record, RecordSink, ReplaySink, forward_emits, record_of
    from .resume import refuse_another_run
    from .run_description import environment, planned_record, versions
    from .run_folder import RunFolder
    from .runner import ExperimentRunner, OptionsByHook
    from .run import Display, Run, attempt, create_manager
    from .run_history import history_without_metrics, read_alerts, read_history, read_step_times
    from .task_building import build_run
    from .session import Session, StrategyPlan
    from .summaries import status_of_script
    from .validation import DivergedError, StepRange, divergence_error
else:
    __getattr__ = names_on_demand(__name__)

__all__ = [
    "ALL", "ATTACHED", "ATTACHED_RUNS", "CONFIG", "EXPLANATION", "INCOMPLETE", "READ", "REWINDS", "SETTINGS", "SUMMARY",
    "TRAINED", "Completed", "Display", "DivergedError", "ExperimentConfig", "ExperimentRunner", "FailedSink",
    "OptionsByHook", "Record", "RecordSink", "ReplaySink", "Run", "RunFlags", "RunFolder", "RunOptions", "RunRecord",
    "RunSettings", "Session", "StepRange", "StrategyPlan", "allowed_words", "attempt", "budget_of", "build_run",
    "changed_files", "changes_text", "check_device", "checked_fields", "create_manager", "describe_type", "differences",
    "divergence_error", "environment", "field_names", "fits", "forward_emits", "history_without_metrics",
    "is_file_name", "load_reference", "planned_record", "read_alerts", "read_decisions", "read_history", "read_initial",
    "read_last_step", "read_outcome", "read_provenance", "read_status", "read_step_times", "record_of",
    "refuse_another_run", "require", "run_folders", "run_name", "script_digest", "status_of_script", "union_members",
    "versions", "warn_of_changes",
]
