"""Hooks that record their calls, act or raise."""

from collections.abc import Callable, Mapping
from typing import Any

from loopscope.hooks import HookPoint, InterventionHook, MetricInfo, TrainingHook


class SpyHook(TrainingHook):
    """An observer at every point that calls ``probe(ctx)`` and returns its result."""

    name = "spy"
    hook_points = frozenset(HookPoint)

    def __init__(self, probe: Callable[[Any], Mapping[str, Any] | None] = lambda ctx: None) -> None:
        self.probe = probe
        self.seen: list[tuple[str, int, int]] = []

    def compute(self, ctx: Any) -> Mapping[str, Any]:
        self.seen.append((ctx.hook_point.name, ctx.epoch, ctx.step))
        return self.probe(ctx) or {}

    def describe_metrics(self) -> list[MetricInfo]:
        return []


class ActingHook(InterventionHook):
    """An intervention at every permitted point that calls ``act(run_ctx, model_ctx)``."""

    name = "acting"
    hook_points = frozenset(HookPoint) - {HookPoint.PRE_UPDATE}
    needs_grads = True
    needs_prev_step_grads = True
    needs_pre_epoch_state = True

    def __init__(self, act: Callable[[Any, Any], Mapping[str, Any] | None]) -> None:
        self.act = act

    def intervene(self, run_ctx: Any, model_ctx: Any) -> Mapping[str, Any]:
        return self.act(run_ctx, model_ctx) or {}

    def describe_metrics(self) -> list[MetricInfo]:
        return []


class ReadOnlyHook(ActingHook):
    """An :class:`ActingHook` with ``mutates = False``."""

    name = "read_only"
    mutates = False
    needs_pre_epoch_state = False


class Mishap(Exception):
    """The exception that the hooks of these tests raise."""


def raising(ctx: Any, *rest: Any) -> None:
    """Raise :class:`Mishap`: a probe for :class:`SpyHook` and an action for :class:`ActingHook`."""
    raise Mishap("on purpose")


def at(hook_class: type[TrainingHook], *points: HookPoint, **attributes: Any) -> type[TrainingHook]:
    """Make a subclass of a hook that fires only at ``points``."""
    return type(hook_class.__name__, (hook_class,), {"hook_points": frozenset(points), **attributes})
