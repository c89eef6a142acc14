"""Listeners: the steps at which they are due, found without a call at most steps."""

from hypothesis import given
from hypothesis import strategies as st
from loopscope.engine.listeners import Listener
from loopscope.hooks import ALWAYS, HookPoint, StepSchedule

from tests.support import SpyHook, at


@given(
    st.sampled_from(["stride", "burst"]),
    st.integers(2, 9),
    st.integers(0, 5),
    st.sets(st.integers(1, 30), max_size=3),
    st.lists(st.integers(1, 60), min_size=1, max_size=60),
)
def test_idle_steps_are_never_due(mode, every, warmup, also, steps) -> None:
    """In any order of steps, also back to earlier ones, an idle step is not in the schedule."""
    schedule = StepSchedule(mode=mode, every_n_steps=every, burst_length=2, warmup=warmup, also=tuple(also))
    hook = at(SpyHook, HookPoint.POST_STEP, step_schedule=schedule)()
    listener = Listener(hook, HookPoint.POST_STEP, ALWAYS)
    for step in steps:
        assert (step not in listener.idle and listener.is_due(0, step)) == schedule.is_due(step)
    assert listener.idle or all(map(schedule.is_due, steps))
