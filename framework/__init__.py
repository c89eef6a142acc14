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

__all__ = [
    "AttachedScope", "Callback", "DebugInterventionHook", "ExperimentConfig", "ExperimentRegistry", "ExperimentRunner",
    "GrokkingConfig", "GrokkingRunner", "HookError", "HookPoint", "HookRegistry", "InterventionHook", "Loader",
    "LoopscopeError", "MetricInfo", "MetricSink", "ModelDataContext", "Remembered", "RunDataContext", "Scope",
    "StateMutationError", "StatePart", "StepSchedule", "TensorLoader", "TrainingHook", "UsageError", "attach",
    "fixed_order", "metric_table", "plot", "random_order", "read_run",
]


if not TYPE_CHECKING:  # type checkers would accept every name

    def __getattr__(name: str) -> Any:
        """Import a name when it is first used, since torch takes seconds."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from .names_on_demand import names_on_demand

        with preserved_streams():
            if name in ("plot", "read_run"):
                import_module(f"{__name__}.sinks")  # registers the sinks that can read a record
            return names_on_demand(__name__)(name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
