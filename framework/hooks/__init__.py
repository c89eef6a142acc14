"""Base classes, contexts, metrics, taps and registries for hook authors."""

from .alerts import ALERTS, LARGEST_STEP, SEVERITIES, Alert, AlertNotice, Recovery, Severity, alert_fields
from .attention_calls import AttentionCall, FusedCall, ScoreBlock, WrittenCall
from .backward_passes import BackwardPass
from .base import DebugInterventionHook, InterventionHook, Remembered, Remembering, TrainingHook, treatments
from .class_checks import hook_options
from .commits import Clipping, StatePart, UndeclaredCommitError
from .contexts import (
    ENDLESS, SET_AT, ForwardResult, MetricInfo, MetricPanel, ObserverServices, OptimizerGroup, RunDataContext, RunInfo,
    metric_table,
)
from .groups import GROUPS, KEYWORDS, always_on, bulk_hooks, hook_groups, hook_kind, select_hooks
from .hook_points import (
    ALWAYS, EPOCH_END, EVERY_STEP, STEP_POINTS, EpochWindow, HookPoint, LoopType, StepSchedule, windows_for,
)
from .metrics import Metrics, MetricSink, MetricValue, Series, as_float
from .model_data_context import ExpiredError, ModelDataContext, ReadOnlyError
from .registries import (
    ConfiguredHook, ExperimentRegistry, HookRegistry, SinkRegistry, build_hooks, create_sinks, options_of,
    refuse_idle_options, without_duplicates,
)
from .taps import (
    AttentionTap, ForwardCall, ForwardTap, GradientTap, OnGradient, QuantizationTap, Quantized, Tap, TapOwner,
)

__all__ = [
    "ALERTS",
    "ALWAYS",
    "ENDLESS",
    "EPOCH_END",
    "EVERY_STEP",
    "GROUPS",
    "KEYWORDS",
    "LARGEST_STEP",
    "SET_AT",
    "SEVERITIES",
    "STEP_POINTS",
    "Alert",
    "AlertNotice",
    "AttentionCall",
    "AttentionTap",
    "BackwardPass",
    "Clipping",
    "ConfiguredHook",
    "DebugInterventionHook",
    "EpochWindow",
    "ExperimentRegistry",
    "ExpiredError",
    "ForwardCall",
    "ForwardResult",
    "ForwardTap",
    "FusedCall",
    "GradientTap",
    "HookPoint",
    "HookRegistry",
    "InterventionHook",
    "LoopType",
    "MetricInfo",
    "MetricPanel",
    "MetricSink",
    "MetricValue",
    "Metrics",
    "ModelDataContext",
    "ObserverServices",
    "OnGradient",
    "OptimizerGroup",
    "QuantizationTap",
    "Quantized",
    "ReadOnlyError",
    "Recovery",
    "Remembered",
    "Remembering",
    "RunDataContext",
    "RunInfo",
    "ScoreBlock",
    "Series",
    "Severity",
    "SinkRegistry",
    "StatePart",
    "StepSchedule",
    "Tap",
    "TapOwner",
    "TrainingHook",
    "UndeclaredCommitError",
    "WrittenCall",
    "alert_fields",
    "always_on",
    "as_float",
    "build_hooks",
    "bulk_hooks",
    "create_sinks",
    "hook_groups",
    "hook_kind",
    "hook_options",
    "metric_table",
    "options_of",
    "refuse_idle_options",
    "select_hooks",
    "treatments",
    "windows_for",
    "without_duplicates",
]
