"""loopscope: look into, and experiment on, neural-network training while it runs, without changing a bit of it."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .preserved_streams import preserved_streams

if TYPE_CHECKING:
    from .data import Loader, TensorLoader, fixed_order, random_order
    from .errors import HookError, LoopscopeError, StateMutationError, UsageError
    from .hooks import (
        DebugInterventionHook, ExperimentRegistry, HookPoint, HookRegistry, InterventionHook, MetricInfo, MetricSink,
        ModelDataContext, Remembered, RunDataContext, StatePart, StepSchedule, TrainingHook, metric_table,
    )
    from .integrations import Scope, attach
    from .report import plot, read_run
    from .runs import ExperimentConfig, ExperimentRunner, GrokkingConfig, GrokkingRunner

_ROOMS = {
    "data": ("Loader", "TensorLoader", "fixed_order", "random_order"),
    "errors": ("HookError", "LoopscopeError", "StateMutationError", "UsageError"),
    "hooks": (
        "DebugInterventionHook", "ExperimentRegistry", "HookPoint", "HookRegistry", "InterventionHook", "MetricInfo",
        "MetricSink", "ModelDataContext", "Remembered", "RunDataContext", "StatePart", "StepSchedule", "TrainingHook",
        "metric_table",
    ),
    "integrations": ("Scope", "attach"),
    "report": ("plot", "read_run"),
    "runs": ("ExperimentConfig", "ExperimentRunner", "GrokkingConfig", "GrokkingRunner"),
}
"""Public names by room: torch takes seconds to import, so a room is imported when a name of it is first used."""
_ROOM_OF = {name: room for room, names in _ROOMS.items() for name in names}
__all__ = [
    "DebugInterventionHook", "ExperimentConfig", "ExperimentRegistry", "ExperimentRunner", "GrokkingConfig",
    "GrokkingRunner", "HookError", "HookPoint", "HookRegistry", "InterventionHook", "Loader", "LoopscopeError",
    "MetricInfo", "MetricSink", "ModelDataContext", "Remembered", "RunDataContext", "Scope", "StateMutationError",
    "StatePart", "StepSchedule", "TensorLoader", "TrainingHook", "UsageError", "attach", "fixed_order", "metric_table",
    "plot", "random_order", "read_run",
]


def __getattr__(name: str) -> Any:
    if name not in _ROOM_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with preserved_streams():
        if _ROOM_OF[name] == "report":
            import_module(f"{__name__}.sinks")  # fills the registry of the sinks that can read a record
        found = getattr(import_module(f"{__name__}.{_ROOM_OF[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
