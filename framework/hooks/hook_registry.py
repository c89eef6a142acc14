"""The registry of hooks."""

from ..registry import Registry
from .base import TrainingHook
from .class_checks import check_hook_class

HookRegistry: Registry[type[TrainingHook]] = Registry(
    "hook",
    "loopscope.hooks",
    check_hook_class,
    TrainingHook,
    {
        "laws": "loopscope.laws.hook",
        "layout_numbers": "loopscope.laws.layout_numbers",
        "moved_weights": "loopscope.laws.layout_numbers",
    },
)
