"""Consecutive calls of loopscope's own hooks share one comparison of bytes, which still finds every write."""

import pytest
from loopscope.errors import StateMutationError
from loopscope.isolation import Call, Isolation
from loopscope.isolation.tripwire import Tripwire
from loopscope.state import TrainingState

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

    def counted(self: Tripwire, culprit: object) -> None:
        culprits.append(str(culprit))
        check_bytes(self, culprit)

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
