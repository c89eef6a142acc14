"""loopscope: look into, and experiment on, neural-network training while it runs, without changing a bit of it."""

from framework.commits import StatePart
from framework.config import ExperimentConfig
from framework.contexts import MetricInfo, RunDataContext
from framework.data import Loader, TensorLoader, fixed_order, random_order
from framework.errors import HookError, LoopscopeError, StateMutationError, UsageError
from framework.hook_points import HookPoint, StepSchedule
from framework.hooks import DebugInterventionHook, InterventionHook, TrainingHook
from framework.metrics import MetricSink
from framework.runner import ExperimentRunner, GrokkingConfig, GrokkingRunner
from framework.sapi import ModelDataContext
from framework.selection import ExperimentRegistry, HookRegistry

__all__ = [
    "DebugInterventionHook",
    "ExperimentConfig",
    "ExperimentRegistry",
    "ExperimentRunner",
    "GrokkingConfig",
    "GrokkingRunner",
    "HookError",
    "HookPoint",
    "HookRegistry",
    "InterventionHook",
    "Loader",
    "LoopscopeError",
    "MetricInfo",
    "MetricSink",
    "ModelDataContext",
    "RunDataContext",
    "StateMutationError",
    "StatePart",
    "StepSchedule",
    "TensorLoader",
    "TrainingHook",
    "UsageError",
    "fixed_order",
    "random_order",
]
