"""Containers and objects of all kinds on modules are rolled back, watched, digested and stored exactly."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from loopscope.checkpoints.content import load_checkpoint, save_checkpoint
from loopscope.errors import StateMutationError
from loopscope.isolation import Call, Isolation, StateCopy, undone_in_modules
from loopscope.isolation.tripwire import Audit
from loopscope.state import RandomStreams, TrainingState, differing
from torch import nn

from tests.support.containers import CONTAINERS, OUT_OF_REACH, WITHOUT_CHECKPOINT, of_model_output, with_key

CALL = Call("spy", "POST_STEP", 1)
OUTPUT = {
    "ModelOutput": (
        of_model_output,
        (
            lambda kept: with_key(kept, "attentions"),
            lambda kept: kept["last_hidden_state"].add_(1),
            lambda kept: kept.clear(),
        ),
    )
}
ALL = {**CONTAINERS, **WITHOUT_CHECKPOINT, **OUTPUT}
CASES = [
    pytest.param(make, change, id=f"{name} {number}", marks=[pytest.mark.trainer] * (name in OUTPUT))
    for name, (make, changes) in ALL.items()
    for number, change in enumerate(changes)
]
STORED = [case for case in CASES if str(case.id).rpartition(" ")[0] not in WITHOUT_CHECKPOINT]
Make, Change = Callable[[], Any], Callable[[Any], Any]


def state_with(value: Any) -> TrainingState:
    torch.manual_seed(1)
    model = nn.Linear(2, 2)
    model.kept = value
    return TrainingState(model, torch.optim.SGD(model.parameters(), 0.1), RandomStreams(1))


@pytest.mark.guarantee("interventions-are-undone")
@pytest.mark.parametrize(("make", "change"), CASES)
def test_change_of_any_container_is_rolled_back(make: Make, change: Change) -> None:
    """A snapshot restores the same objects, twice; so does a pass of a hook."""
    state = state_with(make())
    audit, snapshot = Audit(state, enabled=True), StateCopy().save(state)
    audit.take_baseline()
    for _ in range(2):
        change(state.model.kept)
        snapshot.restore(state)
        audit.check("The rollback")
    with undone_in_modules([state.model]):
        change(state.model.kept)
    audit.check("The pass")


@pytest.mark.guarantee("observers-change-nothing")
@pytest.mark.parametrize(("make", "change"), CASES)
def test_change_of_any_container_is_detected(make: Make, change: Change) -> None:
    """The tripwire and the audit each detect it."""
    state = state_with(make())
    isolation, audit = Isolation(state), Audit(state, enabled=True)
    audit.take_baseline()
    with pytest.raises(StateMutationError, match="Hook 'spy'"), isolation.visit():
        isolation.observe(CALL, lambda: change(state.model.kept))
    with pytest.raises(StateMutationError, match="The caller"):
        audit.check("The caller")


@pytest.mark.guarantee("resumed-runs-are-identical")
@pytest.mark.parametrize(("make", "change"), STORED)
def test_any_container_is_stored_and_loaded(make: Make, change: Change, tmp_path: Path) -> None:
    """The digest shows the change, and a new model gets the changed value of the same class."""
    state, fresh = state_with(make()), state_with(make())
    original = state.digest()
    change(state.model.kept)
    assert differing(original, state.digest()) != []
    save_checkpoint(tmp_path / "a", state, {}, state.streams.save())
    load_checkpoint(tmp_path / "a", fresh)
    assert differing(state.digest(), fresh.digest()) == []
    assert type(fresh.model.kept) is type(state.model.kept)


@pytest.mark.parametrize("name", OUT_OF_REACH)
def test_unreadable_objects_are_named(name: str) -> None:
    assert state_with(OUT_OF_REACH[name]()).out_of_reach().startswith("modules/.kept is a ")
