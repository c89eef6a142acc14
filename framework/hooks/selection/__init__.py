"""The selection of hooks by groups and names, and the creation of hooks and sinks."""

from .creation import ConfiguredHook, build_hooks, create_sinks, refuse_idle_options
from .groups import GROUPS, KEYWORDS, always_on, bulk_hooks, hook_groups, hook_kind, select_hooks

__all__ = [
    "GROUPS", "KEYWORDS", "ConfiguredHook", "always_on", "build_hooks", "bulk_hooks", "create_sinks", "hook_groups",
    "hook_kind", "refuse_idle_options", "select_hooks",
]
