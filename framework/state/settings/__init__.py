"""Process-wide settings of torch: flags, entered modes, deterministic mode, and the settings of a script."""

from .flags import (
    MODE_COUNTERS, GlobalFlags, deterministic, entered_modes, explain_nondeterminism, leave_modes, settings,
)
from .torch_settings import DEFAULT_SETTINGS, neutral_settings, script_settings

__all__ = [
    "DEFAULT_SETTINGS", "MODE_COUNTERS", "GlobalFlags", "deterministic", "entered_modes", "explain_nondeterminism",
    "leave_modes", "neutral_settings", "script_settings", "settings",
]
