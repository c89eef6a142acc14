"""Events of a loop that is not loopscope's own, noticed at the functions of torch that every loop calls."""

from .events import PassiveListener, listen, stop_listening
from .found_parts import (
    modules_over,
    optimizers_over,
    referred_by_callers,
    scaler_in_use,
    schedulers_of,
    wrapped_by,
)
from .loader_waits import stop_timing, time_loaders
from .places import place

__all__ = [
    "PassiveListener",
    "listen",
    "modules_over",
    "optimizers_over",
    "place",
    "referred_by_callers",
    "scaler_in_use",
    "schedulers_of",
    "stop_listening",
    "stop_timing",
    "time_loaders",
    "wrapped_by",
]
