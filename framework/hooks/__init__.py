"""Base classes, contexts, metrics, taps and registries for hook authors."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .alerts import ALERTS, LARGEST_STEP, SEVERITIES, Alert, AlertNotice, Recovery, Severity, alert_fields
from .base import DebugInterventionHook, InterventionHook, Remembered, Remembering, TrainingHook, treatments
from .class_checks import hook_options
from .commits import Clipping, StatePart, UndeclaredCommitError
from .contexts import (
    ENDLESS, SET_AT, BackwardContext, ForwardResult, MetricInfo, MetricPanel, ObserverServices, OptimizerGroup,
    RunDataContext, RunInfo, metric_table,
)
from .hook_points import (
    ALWAYS, EPOCH_END, EVERY_STEP, STEP_POINTS, EpochWindow, HookPoint, LoopType, StepSchedule, windows_for,
)
from .metrics import Metrics, MetricSink, MetricValue, Series, as_float
from .model_data_context import ExpiredError, ModelDataContext, ReadOnlyError
from .registries import ExperimentRegistry, HookRegistry, SinkRegistry
from .taps import (
    AttentionTap, ForwardCall, ForwardTap, GradientTap, OnGradient, QuantizationTap, Quantized, StepTap, Tap, TapOwner,
)

if TYPE_CHECKING:
    from .attention_calls import AttentionCall, FusedCall, ScoreBlock, WrittenCall
    from .selection import create_sinks

__all__ = [
    "ALERTS", "ALWAYS", "ENDLESS", "EPOCH_END", "EVERY_STEP", "LARGEST_STEP", "SET_AT", "SEVERITIES", "STEP_POINTS",
    "Alert", "AlertNotice", "AttentionCall", "AttentionTap", "BackwardContext", "Clipping", "DebugInterventionHook",
    "EpochWindow", "ExperimentRegistry", "ExpiredError", "ForwardCall", "ForwardResult", "ForwardTap", "FusedCall",
    "GradientTap", "HookPoint", "HookRegistry", "InterventionHook", "LoopType", "MetricInfo", "MetricPanel",
    "MetricSink", "MetricValue", "Metrics", "ModelDataContext", "ObserverServices", "OnGradient", "OptimizerGroup",
    "QuantizationTap", "Quantized", "ReadOnlyError", "Recovery", "Remembered", "Remembering", "RunDataContext",
    "RunInfo", "ScoreBlock", "Series", "Severity", "SinkRegistry", "StatePart", "StepSchedule", "StepTap", "Tap",
    "TapOwner", "TrainingHook", "UndeclaredCommitError", "WrittenCall", "alert_fields", "as_float", "create_sinks",
    "hook_options", "metric_table", "treatments", "windows_for",
]
_MODULES = {
    **dict.fromkeys(("AttentionCall", "FusedCall", "ScoreBlock", "WrittenCall"), "attention_calls"),
    "create_sinks": "selection",
}
"""Modules that are imported when one of these names is first used: most authors of hooks do not need them."""


if not TYPE_CHECKING:  # type checkers would accept every name

    def __getattr__(name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = value = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
        return value
