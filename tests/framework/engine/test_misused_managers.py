"""Incorrect uses of hook managers raise errors or issue warnings."""

import gc
import subprocess
import sys

import pytest
from loopscope.engine import HookManager
from loopscope.errors import RunNotice, UsageError
from loopscope.hooks import HookPoint
from loopscope.loops import epoch_loop, step_loop
from loopscope.training_hooks import Norms

from tests.support import LOOPS, Case, RecordingSink, SpyHook, at, build


@pytest.mark.parametrize(
    ("hook", "sentence"),
    [
        ("norms", r"'norms' is not a hook object; create it with norms\(\), or HookRegistry.get\('norms'\)\(\)"),
        (Norms, r"<class .*Norms'> is not a hook object; create it with Norms\(\)"),
        (None, "None is not a hook object"),
        (print, "<built-in function print> is not a hook object"),
    ],
)
def test_non_hook_is_refused_with_a_remedy(hook, sentence) -> None:
    """The error shows how to create a hook from a name or a class."""
    with pytest.raises(UsageError, match=sentence):
        HookManager([hook], *build(Case()))


@pytest.mark.parametrize("loop", LOOPS)
def test_loop_refuses_manager_of_other_loop(loop) -> None:
    """No step is taken."""
    task, state = build(Case(loop=loop))
    manager = HookManager([SpyHook()], task, state, loop=loop)
    other = step_loop if loop == "epoch" else epoch_loop
    with pytest.raises(
        UsageError, match=rf"was created for the {loop} loop; create it with HookManager\(\.\.\., loop='"
    ):
        other(task, manager)
    assert state.loop.step == 0


@pytest.mark.parametrize("loop", LOOPS)
def test_manager_without_hooks_works_in_both_loops(loop) -> None:
    task, state = build(Case(loop=loop))
    (epoch_loop if loop == "epoch" else step_loop)(task, HookManager([], task, state))
    assert state.loop.step > 0


@pytest.mark.parametrize("loop", LOOPS)
def test_manager_is_refused_after_its_end(loop) -> None:
    task, state = build(Case(loop=loop))
    manager = HookManager([SpyHook()], task, state, loop=loop)
    run = epoch_loop if loop == "epoch" else step_loop
    run(task, manager)
    manager.end("completed")
    with pytest.raises(UsageError, match="has ended; create a new one"):
        run(task, manager)


def abandon_manager(*, end: bool, sinks: bool = True) -> None:
    """Delete a manager whose last step has undelivered metrics."""
    spy = at(SpyHook, HookPoint.POST_STEP)(lambda ctx: {"x": 1.0})
    task, state = build(Case(loop="step"))
    manager = HookManager([spy], task, state, loop="step", sinks=[RecordingSink()] if sinks else [])
    manager.fire(HookPoint.POST_STEP)
    if end:
        manager.end("completed")
    del manager, task, state
    gc.collect()


@pytest.mark.longer
def test_unended_manager_warns_about_lost_metrics() -> None:
    """The notice names manager.end if the last step has metrics that no sink received."""
    with pytest.warns(RunNotice, match=r"was not ended: metrics of its last steps are lost.*manager\.end"):
        abandon_manager(end=False)


@pytest.mark.some_rows(2)
@pytest.mark.longer
@pytest.mark.parametrize("options", [{"end": True}, {"end": False, "sinks": False}])
def test_manager_without_losses_does_not_warn(options, recwarn) -> None:
    """There is no warning after manager.end or without sinks."""
    abandon_manager(**options)
    assert not [item for item in recwarn if "was not ended" in str(item.message)]


@pytest.mark.slow
@pytest.mark.process
def test_unended_manager_warns_at_program_exit() -> None:
    program = """
from tests.framework.engine.test_misused_managers import *
spy = at(SpyHook, HookPoint.POST_STEP)(lambda ctx: {"x": 1.0})
task, state = build(Case(loop="step"))
manager = HookManager([spy], task, state, loop="step", sinks=[RecordingSink()])
manager.fire(HookPoint.POST_STEP)
"""
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    assert "RunNotice: A hook manager was not ended" in process.stderr
