"""Base classes, contexts, metrics, taps and registries for hook authors."""

from typing import TYPE_CHECKING

from ..names_on_demand import names_on_demand

if TYPE_CHECKING:
    from .alerts import ALERTS, LARGEST_STEP, SEVERITIES, Alert, AlertNotice, Recovery, Severity, alert_fields
    from .attention_calls import AttentionCall, FusedCall, ScoreBlock, WrittenCall
    from .base import DebugInterventionHook, InterventionHook, Remembered, Remembering, TrainingHook, treatments
    from .class_checks import HookRegistry, hook_options
    from .commits import Clipping, StatePart, UndeclaredCommitError
    from .contexts import (
        SET_AT, BackwardContext, ForwardResult, MetricInfo, MetricPanel, ObserverServices, OptimizerGroup,
        RunDataContext, RunInfo, metric_table,
    )
    from .hook_points import (
        ALWAYS, ENDLESS, EPOCH_END, EVERY_STEP, STEP_POINTS, EpochWindow, HookPoint, LoopType, StepSchedule,
        windows_for,
    )
    from .metrics import Metrics, MetricSink, MetricValue, Series, as_float
    from .model_data_context import ExpiredError, ModelDataContext, ReadOnlyError
    from .registries import ExperimentRegistry, SinkRegistry
    from .selection import create_sinks
    from .taps import (
        AttentionTap, ForwardCall, ForwardTap, GradientTap, OnGradient, QuantizationTap, Quantized, StepTap, Tap,
        TapOwner,
    )
else:
    __getattr__ = names_on_demand(__name__)

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
