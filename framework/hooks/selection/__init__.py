"""The selection of hooks by groups and names, and the creation of hooks and sinks."""

from typing import TYPE_CHECKING

from ...names_on_demand import names_on_demand

if TYPE_CHECKING:
    from .creation import ConfiguredHook, build_hooks, create_sinks, refuse_idle_options
    from .groups import GROUPS, KEYWORDS, always_on, bulk_hooks, hook_groups, hook_kind, select_hooks
else:
    __getattr__ = names_on_demand(__name__)

__all__ = [
    "GROUPS", "KEYWORDS", "ConfiguredHook", "always_on", "build_hooks", "bulk_hooks", "create_sinks", "hook_groups",
    "hook_kind", "refuse_idle_options", "select_hooks",
]
