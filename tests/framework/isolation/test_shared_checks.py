"""Consecutive calls of loopscope's own hooks share their checks, which still find every write."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from loopscope.engine import HookManager
from loopscope.errors import StateMutationError
from loopscope.hooks import HookPoint
from loopscope.isolation import Call, Isolation
from loopscope.isolation.tripwire import Tripwire
from loopscope.state import TrainingState
from loopscope.training_hooks.progress import TrainingMetrics

from tests.support import Case, build

OWN = [Call(name, "POST_STEP", 1, "Hook", True) for name in ("first", "second", "third")]
FOREIGN = Call("foreign", "POST_STEP", 1)


def made() -> TrainingState:
    return build(Case())[1]


def write(state: TrainingState) -> None:
    """Write without torch noticing: no version counter and no address changes."""
    next(state.modules.parameters()).data.view(-1)[0] += 1.0


def nothing() -> None:
    pass


def observe_all(isolation: Isolation, state: TrainingState, calls: list[Call], writer: str) -> None:
    """Make the calls in one visit, of which one writes."""
    with isolation.visit():
        for call in calls:
            isolation.observe(call, (lambda: write(state)) if call.name == writer else nothing)


@pytest.fixture
def comparisons(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the culprits of the comparisons that are made."""
    culprits: list[str] = []
    check_bytes = Tripwire.check_bytes

    def counted(self: Tripwire, caller: object) -> None:
        culprits.append(str(caller))
        check_bytes(self, caller)

    monkeypatch.setattr(Tripwire, "check_bytes", counted)
    return culprits


def test_own_calls_share_one_comparison(comparisons):
    """Calls of other code are compared alone, after the calls before them."""
    isolation = Isolation(made())
    with isolation.visit():
        for call in (*OWN[:2], FOREIGN, OWN[2]):
            isolation.observe(call, nothing)
    subject = "Hook '{}' at POST_STEP of step 1".format
    assert comparisons == [f"{subject('first')} or {subject('second')}", subject("foreign"), subject("third")]


@pytest.mark.guarantee("observers-change-nothing")
@pytest.mark.parametrize("writer", ["first", "second", "third"])
def test_write_by_own_hook_names_all_candidates(writer):
    """No version counter changes, so the write is found by the comparison at the end of the visit."""
    state = made()
    with pytest.raises(StateMutationError) as caught:
        observe_all(Isolation(state), state, OWN, writer)
    assert all(f"Hook '{call.name}'" in str(caught.value) for call in OWN)


@pytest.mark.guarantee("observers-change-nothing")
@pytest.mark.parametrize("writer", ["first", "foreign"])
def test_own_writes_are_not_blamed_on_others(writer):
    """The write of an own hook is found before the next call of other code, and that of other code right after it."""
    state = made()
    with pytest.raises(StateMutationError) as caught:
        observe_all(Isolation(state), state, [OWN[0], FOREIGN, OWN[1]], writer)
    assert f"Hook '{writer}'" in str(caught.value)
    assert str(caught.value).count("Hook '") == 1


@pytest.mark.guarantee("observers-change-nothing")
def test_audit_compares_every_own_call(comparisons):
    """Under audit the bytes are compared around every single call."""
    state = made()
    with pytest.raises(StateMutationError, match="Hook 'second'"):
        observe_all(Isolation(state, audit=True), state, OWN, "second")
    assert comparisons == []


def test_commits_of_own_interventions_are_no_writes(comparisons):
    """An intervention is compared alone, before its commit is applied."""
    state = made()
    isolation = Isolation(state)
    with isolation.visit():
        isolation.observe(OWN[0], nothing)
        isolation.intervene(OWN[1], nothing, mutates=False)
        write(state)
        isolation.note_commit()
        isolation.observe(OWN[2], nothing)
    assert [text.count("Hook '") for text in comparisons] == [1, 1, 1]


@pytest.mark.guarantee("observers-change-nothing")
@pytest.mark.parametrize("writer", ["first", "second", "third"])
def test_separate_checks_name_one_hook(writer):
    """With ``check_every_call`` no call shares its comparison."""
    state = made()
    with pytest.raises(StateMutationError, match=f"Hook '{writer}' at POST_STEP") as caught:
        observe_all(Isolation(state, check_every_call=True), state, OWN, writer)
    assert not any(f"Hook '{call.name}'" in str(caught.value) for call in OWN if call.name != writer)


def write_openly(state: TrainingState) -> None:
    """Write in place, which increments a version counter."""
    with torch.no_grad():
        next(state.modules.parameters()).add_(1)


def pass_full_checks(isolation: Isolation, calls: list[Call]) -> None:
    """Make the first four calls of each, which are checked alone."""
    for _ in range(4):
        with isolation.visit():
            for call in calls:
                isolation.observe(call, nothing)


def make_calls(isolation: Isolation, functions: dict[Call, Callable[[], object]]) -> None:
    """Make the calls with their functions in one visit."""
    with isolation.visit():
        for call, function in functions.items():
            isolation.observe(call, function)


@pytest.fixture
def quick_checks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the culprits of the quick checks that are made."""
    culprits: list[str] = []
    check_quickly = Tripwire.check_quickly

    def counted(self: Tripwire, caller: object) -> None:
        culprits.append(str(caller))
        check_quickly(self, caller)

    monkeypatch.setattr(Tripwire, "check_quickly", counted)
    return culprits


@pytest.mark.parametrize(("every", "counts"), [(False, [2, 1, 1]), (True, [1, 1, 1, 1])])
def test_own_calls_share_one_quick_check(quick_checks, every, counts):
    """Calls of other code are checked alone, after the calls before them."""
    isolation = Isolation(made(), check_every_call=every)
    pass_full_checks(isolation, [*OWN, FOREIGN])
    quick_checks.clear()
    with isolation.visit():
        for call in (*OWN[:2], FOREIGN, OWN[2]):
            isolation.observe(call, nothing)
    assert [text.count("Hook '") for text in quick_checks] == counts


@pytest.mark.guarantee("observers-change-nothing")
@pytest.mark.parametrize("writer", ["first", "second", "third"])
def test_own_open_write_names_all_candidates(writer):
    """The shared quick check finds a write that incremented a version counter, in a call without a full check."""
    state = made()
    isolation = Isolation(state)
    pass_full_checks(isolation, OWN)
    functions = {call: partial(write_openly, state) if call.name == writer else nothing for call in OWN}
    with pytest.raises(StateMutationError) as caught:
        make_calls(isolation, functions)
    assert all(f"Hook '{call.name}'" in str(caught.value) for call in OWN)


@pytest.mark.guarantee("observers-change-nothing")
@pytest.mark.parametrize("writer", ["first", "foreign"])
def test_own_open_writes_are_not_blamed_on_others(writer):
    """A write that incremented a version counter is found before the next call of other code, as well."""
    state = made()
    isolation = Isolation(state)
    pass_full_checks(isolation, [*OWN, FOREIGN])
    calls = (OWN[0], FOREIGN, OWN[1])
    functions = {call: partial(write_openly, state) if call.name == writer else nothing for call in calls}
    with pytest.raises(StateMutationError) as caught:
        make_calls(isolation, functions)
    assert f"Hook '{writer}'" in str(caught.value)
    assert str(caught.value).count("Hook '") == 1


@pytest.mark.guarantee("observers-change-nothing")
def test_bytes_are_recorded_after_the_shared_check():
    """The bytes of a changed state must not be recorded for the full check of the next call."""
    state = made()
    isolation = Isolation(state)
    pass_full_checks(isolation, OWN[:1])
    with pytest.raises(StateMutationError, match="Hook 'first' at POST_STEP"):
        make_calls(isolation, {OWN[0]: partial(write_openly, state), OWN[1]: nothing})


@pytest.mark.guarantee("observers-change-nothing")
def test_raising_own_call_is_checked_with_earlier_ones():
    """The write of the first call is not attributed to the second alone, whose error is of no use then."""
    state = made()
    isolation = Isolation(state)
    pass_full_checks(isolation, OWN)
    with pytest.raises(StateMutationError, match=r"Hook 'first' .* or Hook 'second'"):
        make_calls(isolation, {OWN[0]: partial(write_openly, state), OWN[1]: lambda: 1 / 0})


@pytest.mark.guarantee("observers-change-nothing")
def test_open_write_by_own_observer_ends_the_run():
    """The error of the shared check ends the run like one of a single call: no hook is called afterwards."""
    task, state = build(Case())
    hook = TrainingMetrics()
    hook.loop_points = {"epoch": {HookPoint.PRE_STEP}}
    manager = HookManager([hook], task, state)
    for _ in range(4):
        manager.fire(HookPoint.PRE_STEP)
    hook.compute = lambda ctx: write_openly(state) or {}
    with pytest.raises(StateMutationError, match="Hook 'training_metrics' at PRE_STEP"):
        manager.fire(HookPoint.PRE_STEP)
    hook.compute = lambda ctx: pytest.fail("called after a change of the training state")
    manager.fire(HookPoint.PRE_STEP)
    manager.end("failed")


@pytest.mark.parametrize("calls", [4, 5, 8])
def test_nested_call_accepts_disabled_gradients(calls):
    """Another hook's call within a call without gradients checks the earlier ones, and finds nothing."""
    isolation = Isolation(made())
    own, other = Call("own", "state_dict", 1, is_shipped=True), Call("other", "state_dict", 1)

    def content():
        for _ in range(calls):
            isolation.observe(own, lambda: None)
        isolation.observe(other, lambda: None)

    with isolation.visit():
        isolation.observe(Call("checkpoint", "the loop", 1), content)
    assert torch.is_grad_enabled()


def switch_mode(state: TrainingState) -> None:
    """Change an attribute of the model, which increments no version counter."""
    state.model.training = not state.model.training


@pytest.mark.guarantee("observers-change-nothing")
@pytest.mark.parametrize("number", [1, 2, 3, 4, 8])
def test_own_changes_of_modes_end_complete_checks(number):
    """The complete check of calls 1, 2, 3, 4, 8 finds what the quick one does not compare."""
    state = made()
    isolation = Isolation(state)
    for _ in range(number - 1):
        make_calls(isolation, {OWN[0]: nothing})
    with pytest.raises(StateMutationError, match=r"Hook 'first' .*modules/\.training"):
        make_calls(isolation, {OWN[0]: partial(switch_mode, state)})


@pytest.mark.guarantee("observers-change-nothing")
@pytest.mark.parametrize("calls", [[FOREIGN], [OWN[0], FOREIGN], [FOREIGN, OWN[0]]])
def test_other_calls_are_always_checked_completely(calls):
    """A quick baseline of own calls is replaced before a call of other code."""
    state = made()
    isolation = Isolation(state)
    for _ in range(4):
        make_calls(isolation, dict.fromkeys(calls, nothing))
    functions = {call: partial(switch_mode, state) if call is FOREIGN else nothing for call in calls}
    with pytest.raises(StateMutationError, match="Hook 'foreign'"):
        make_calls(isolation, functions)


def test_own_calls_between_checks_take_quick_baselines(monkeypatch):
    """The complete sweep is left out at calls 5, 6 and 7, and made twice at the eighth, before and after it."""
    isolation, sweeps = Isolation(made()), []
    sweep_rest = Tripwire._sweep_rest
    monkeypatch.setattr(Tripwire, "_sweep_rest", lambda *values: sweeps.append(1) or sweep_rest(*values))
    pass_full_checks(isolation, OWN[:1])
    sweeps.clear()
    for _ in range(3):
        make_calls(isolation, {OWN[0]: nothing})
    assert sweeps == []
    make_calls(isolation, {OWN[0]: nothing})
    assert len(sweeps) == 2
