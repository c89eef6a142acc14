"""A hook that stores the descriptions of backward passes."""

from typing import Any

from loopscope.doctor.senses import BackwardPass, BackwardRecorder
from loopscope.hooks import BackwardContext, HookPoint

from tests.support import SpyHook

Passes = dict[int, tuple[BackwardPass, ...]]


class LossReader(SpyHook):
    """Stores in ``passes``, by step, what a recorder has described before POST_BACKWARD."""

    hook_points = frozenset({HookPoint.POST_BACKWARD})

    def __init__(self, passes: Passes, **schedules: Any) -> None:
        super().__init__(lambda ctx: passes.__setitem__(ctx.step, self._recorder.of(ctx.step)))
        self._recorder = BackwardRecorder()
        vars(self).update(schedules)

    def before_backward(self, ctx: BackwardContext) -> None:
        self._recorder.record(ctx)
