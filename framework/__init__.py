"""loopscope: observe neural-network training, and experiment on it, while it runs, without changing a bit of it."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .preserved_streams import preserved_streams

if TYPE_CHECKING:
    from .data import Loader, TensorLoader, fixed_order, random_order
    from .errors import HookError, LoopscopeError, StateMutationError, UsageError
    from .experiments import GrokkingConfig, GrokkingRunner
    from .hooks import (
        DebugInterventionHook, ExperimentRegistry, HookPoint, HookRegistry, InterventionHook, MetricInfo, MetricSink,
        ModelDataContext, Remembered, RunDataContext, StatePart, StepSchedule, TrainingHook, metric_table,
    )
    from .integrations import AttachedScope, Callback, Scope, attach
    from .report import plot, read_run
    from .runs import ExperimentConfig, ExperimentRunner

_NAMES_OF = {
    "data": ("Loader", "TensorLoader", "fixed_order", "random_order"),
    "errors": ("HookError", "LoopscopeError", "StateMutationError", "UsageError"),
    "experiments": ("GrokkingConfig", "GrokkingRunner"),
    "hooks": (
        "DebugInterventionHook", "ExperimentRegistry", "HookPoint", "HookRegistry", "InterventionHook", "MetricInfo",
        "MetricSink", "ModelDataContext", "Remembered", "RunDataContext", "StatePart", "StepSchedule", "TrainingHook",
        "metric_table",
    ),
    "integrations": ("AttachedScope", "Callback", "Scope", "attach"),
    "report": ("plot", "read_run"),
    "runs": ("ExperimentConfig", "ExperimentRunner"),
}
"""Public names by package. A package is imported when one of its names is first used, since torch takes seconds."""
_PACKAGE_OF = {name: package for package, names in _NAMES_OF.items() for name in names}
__all__ = [
    "AttachedScope", "Callback", "DebugInterventionHook", "ExperimentConfig", "ExperimentRegistry", "ExperimentRunner",
    "GrokkingConfig", "GrokkingRunner", "HookError", "HookPoint", "HookRegistry", "InterventionHook", "Loader",
    "LoopscopeError", "MetricInfo", "MetricSink", "ModelDataContext", "Remembered", "RunDataContext", "Scope",
    "StateMutationError", "StatePart", "StepSchedule", "TensorLoader", "TrainingHook", "UsageError", "attach",
    "fixed_order", "metric_table", "plot", "random_order", "read_run",
]


if not TYPE_CHECKING:  # type checkers would accept every name

    def __getattr__(name: str) -> Any:
        if name not in _PACKAGE_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        with preserved_streams():
            if _PACKAGE_OF[name] == "report":
                import_module(f"{__name__}.sinks")  # registers the sinks that can read a record
            value = getattr(import_module(f"{__name__}.{_PACKAGE_OF[name]}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
