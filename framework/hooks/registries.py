"""The registries of hooks, sinks and experiments."""

from typing import Any

from ..registry import Registry
from .base import TrainingHook
from .class_checks import check_experiment_class, check_hook_class, check_sink_class
from .metrics import MetricSink

HookRegistry: Registry[type[TrainingHook]] = Registry(
    "hook", "loopscope.hooks", check_hook_class, TrainingHook, {"laws": "loopscope.laws.hook"}
)
SinkRegistry: Registry[type[MetricSink]] = Registry("sink", "loopscope.sinks", check_sink_class)
ExperimentRegistry: Registry[type[Any]] = Registry("experiment", "loopscope.experiments", check_experiment_class)
