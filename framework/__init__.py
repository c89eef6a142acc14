"""loopscope: look into, and experiment on, neural-network training while it runs, without changing a bit of it."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .commits import StatePart
    from .config import ExperimentConfig
    from .contexts import MetricInfo, RunDataContext
    from .data import Loader, TensorLoader, fixed_order, random_order
    from .errors import HookError, LoopscopeError, StateMutationError, UsageError
    from .hook_points import HookPoint, StepSchedule
    from .hooks import DebugInterventionHook, InterventionHook, TrainingHook
    from .metrics import MetricSink
    from .runner import ExperimentRunner, GrokkingConfig, GrokkingRunner
    from .sapi import ModelDataContext
    from .selection import ExperimentRegistry, HookRegistry

_ROOMS = {
    "commits": ("StatePart",),
    "config": ("ExperimentConfig",),
    "contexts": ("MetricInfo", "RunDataContext"),
    "data": ("Loader", "TensorLoader", "fixed_order", "random_order"),
    "errors": ("HookError", "LoopscopeError", "StateMutationError", "UsageError"),
    "hook_points": ("HookPoint", "StepSchedule"),
    "hooks": ("DebugInterventionHook", "InterventionHook", "TrainingHook"),
    "metrics": ("MetricSink",),
    "runner": ("ExperimentRunner", "GrokkingConfig", "GrokkingRunner"),
    "sapi": ("ModelDataContext",),
    "selection": ("ExperimentRegistry", "HookRegistry"),
}
"""Public names by room: torch takes seconds to import, so a room is imported when a name of it is first used."""
_ROOM_OF = {name: room for room, names in _ROOMS.items() for name in names}
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


def __getattr__(name: str) -> Any:
    if name not in _ROOM_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(import_module(f"{__name__}.{_ROOM_OF[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
