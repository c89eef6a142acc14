"""State in unusual places of a model, an optimizer or a scheduler is rolled back, digested, watched and stored."""

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from loopscope.checkpoints.content import load_checkpoint, save_checkpoint
from loopscope.errors import StateMutationError, UsageError
from loopscope.hooks import HookPoint
from loopscope.isolation import Call, Isolation, StateCopy
from loopscope.isolation.tripwire import Audit
from loopscope.state import RandomStreams, TrainingState, differing
from torch import nn

from tests.support import ActingHook, Case, SpyHook, at, train
from tests.support.odd_objects import (
    Average,
    Lookahead,
    Named,
    Preconditioner,
    Record,
    Schedule,
    Slotted,
    TwoOptimizers,
    Warmup,
    Wrapped,
    counting_hook,
)

pytestmark = pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler")
CALL = Call("spy", "POST_STEP", 1)


def call_hooks(state: TrainingState) -> None:
    state.model(torch.ones(1, 2))


@dataclass(frozen=True)
class Place:
    """An unusual place of state: its setup and a mutation of it."""

    prepare: Callable[[TrainingState], Any]
    change: Callable[[TrainingState], Any]


def on_model(make: Callable[[], Any], change: Callable[[Any], Any]) -> Place:
    return Place(lambda state: setattr(state.model, "kept", make()), lambda state: change(state.model.kept))


def remember(state: TrainingState) -> None:
    for parameter in state.model.parameters():
        state.optimizer.state[parameter]["preconditioner"] = Preconditioner()


def with_scheduler(make: Callable[[Any], Any]) -> Place:
    return Place(lambda state: setattr(state, "scheduler", make(state.optimizer)), lambda state: state.scheduler.step())


def on_optimizer(make: Callable[[Average], Callable[..., Any]]) -> Place:
    return Place(
        lambda state: state.optimizer.register_step_post_hook(make(Average(state.model))),
        lambda state: [hook(None, (), {}) for hook in state.optimizer._optimizer_step_post_hooks.values()],
    )


def a_step_of_two(state: TrainingState) -> None:
    for parameter in state.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    state.optimizer.step()
    state.optimizer.zero_grad()


def hold_itself(record: Record) -> Record:
    record.owner = [record, lambda: record]
    return record


PLACES = {
    "dataclass": on_model(lambda: hold_itself(Record()), lambda kept: setattr(kept, "total", 3.0)),
    "list in a dataclass": on_model(lambda: hold_itself(Record()), lambda kept: kept.seen.append(1)),
    "slots": on_model(Slotted, lambda kept: setattr(kept, "count", 3)),
    "tensor in slots": on_model(Slotted, lambda kept: kept.mean.add_(1)),
    "callable": on_model(Preconditioner, lambda kept: kept(torch.ones(1))),
    "namespace": on_model(lambda: SimpleNamespace(count=0), lambda kept: setattr(kept, "count", 1)),
    "dict with attributes": on_model(lambda: Named(a=1), lambda kept: setattr(kept, "hits", 5)),
    "mapping proxy": on_model(lambda: [MappingProxyType(TABLE), TABLE], lambda kept: kept[1].update(b=2)),
    "deque of tensors": on_model(lambda: deque([torch.zeros(2)], 3), lambda kept: kept[0].add_(1)),
    "tensor": on_model(lambda: torch.zeros(2), lambda kept: kept.add_(1)),
    "module in a list": on_model(lambda: [nn.BatchNorm1d(2)], lambda kept: kept[0].running_mean.add_(1)),
    "array": on_model(lambda: np.zeros((2, 3), np.float16), lambda kept: kept.__setitem__((0, 1), 7)),
    "array that grows": on_model(lambda: np.zeros(3), lambda kept: kept.resize(5, refcheck=False)),
    "NumPy generator": on_model(lambda: np.random.default_rng(1), lambda kept: kept.random()),
    "NumPy MT19937": on_model(lambda: np.random.Generator(np.random.MT19937(1)), lambda kept: kept.standard_normal(3)),
    "NumPy random state": on_model(lambda: np.random.RandomState(1), lambda kept: kept.standard_normal()),
    "Python generator": on_model(lambda: random.Random(1), lambda kept: kept.random()),
    "late torch generator": on_model(lambda: [torch.Generator().manual_seed(2)], lambda kept: kept[0].manual_seed(3)),
    "bytes": on_model(lambda: bytearray(3), lambda kept: kept.append(1)),
    "forward hook that counts": Place(lambda state: state.model.register_forward_hook(counting_hook()), call_hooks),
    "optimizer state": Place(
        remember, lambda state: [moments["preconditioner"](torch.ones(1)) for moments in state.optimizer.state.values()]
    ),
    "average by a method": on_optimizer(lambda average: average.update),
    "average by a closure": on_optimizer(lambda average: lambda *_: average.update()),
    "two optimizers": Place(lambda state: setattr(state, "optimizer", TwoOptimizers(state.model)), a_step_of_two),
    "optimizer before another": Place(
        lambda state: setattr(state, "optimizer", Lookahead(state.optimizer)), a_step_of_two
    ),
    "timm's way": with_scheduler(Warmup),
    "method of an object": with_scheduler(
        lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, Schedule().factor)
    ),
}
TABLE = {"a": 1}


def made(place: Place) -> TrainingState:
    torch.manual_seed(1)
    TABLE.clear()
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    state = TrainingState(model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), RandomStreams(1))
    place.prepare(state)
    return state


@pytest.fixture(params=PLACES)
def place(request: Any) -> Place:
    return PLACES[request.param]


@pytest.mark.guarantee("interventions-are-undone")
def test_intervention_changes_are_digested_and_reverted(place: Place) -> None:
    """The digest detects repeated changes at each unusual place, and a snapshot reverts them."""
    state = made(place)
    original, snapshot = state.digest(), StateCopy().save(state)
    for _ in range(2):
        place.change(state)
        place.change(state)
        assert differing(original, state.digest()) != []
        snapshot.restore(state)
        assert differing(original, state.digest()) == []


@pytest.mark.guarantee("observers-change-nothing")
def test_observer_changes_are_caught(place: Place) -> None:
    """The tripwire and the audit detect changes at each unusual place."""
    state = made(place)
    isolation, audit = Isolation(state), Audit(state, enabled=True)
    with isolation.visit():
        isolation.observe(CALL, lambda: None)
    audit.take_baseline()
    audit.check("The caller")
    with pytest.raises(StateMutationError, match=r"Hook 'spy' .* changed the training state: ."), isolation.visit():
        isolation.observe(CALL, lambda: place.change(state))
    with pytest.raises(StateMutationError, match="The caller may only read"):
        audit.check("The caller")


@pytest.mark.guarantee("resumed-runs-are-identical")
def test_checkpoints_restore_the_changed_place(place: Place, tmp_path: Path) -> None:
    """Checkpoints restore arrays, generators, slots, and the contents of hooks and schedulers."""
    state = made(place)
    place.change(state)
    if place is PLACES["optimizer state"]:
        with pytest.raises(UsageError, match=r"preconditioner is a \S*Preconditioner, which a checkpoint cannot store"):
            save_checkpoint(tmp_path / "a", state, {}, state.streams.save())
        return
    original = state.digest()
    save_checkpoint(tmp_path / "a", state, {}, state.streams.save())
    fresh = made(place)
    load_checkpoint(tmp_path / "a", fresh)
    assert differing(original, fresh.digest()) == []
    groups = [
        optimizer.param_groups for optimizer in (fresh.optimizer, getattr(fresh.optimizer, "base", fresh.optimizer))
    ]
    assert groups[0][0] is groups[1][0]


def with_odd_update(task: Any, state: TrainingState) -> None:
    task.optimizer = state.optimizer = Wrapped(state.model)
    task.scheduler = state.scheduler = Warmup(task.optimizer)
    state.model.register_forward_hook(counting_hook())
    state.optimizer.parts[0].register_step_post_hook(Average(state.model).update)


def train_and_undo(run_ctx: Any, model_ctx: Any) -> None:
    model_ctx.take_step(run_ctx.batch_data)
    model_ctx.run_training_epoch(model_ctx.loader)


@pytest.mark.longer
@pytest.mark.some_rows(2)
@pytest.mark.guarantee("interventions-are-undone")
@pytest.mark.parametrize("audit", [False, True])
def test_odd_optimizer_run_keeps_its_bytes(audit: bool) -> None:
    """An unusual optimizer and scheduler have the same states with and without interventions."""
    bare = train(Case(), steps=4, audit=False, introduce=with_odd_update, scheduler_interval="step")
    observer = SpyHook(lambda ctx: {"groups": len(ctx.optimizer_groups)})
    hooks = [observer, at(ActingHook, HookPoint.POST_STEP, HookPoint.POST_BACKWARD)(train_and_undo)]
    run = train(Case(), hooks, steps=4, audit=audit, introduce=with_odd_update, scheduler_interval="step")
    assert run.digests == bare.digests
    assert run.final == bare.final
