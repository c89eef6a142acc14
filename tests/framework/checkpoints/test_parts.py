"""The table of state parts: checkpoints, digest, tripwire and snapshots cover module attributes and added parts."""

from collections import OrderedDict, deque
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from io import BytesIO
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from loopscope.checkpoints import open_checkpoint
from loopscope.checkpoints.content import load_checkpoint, save_checkpoint
from loopscope.engine import HookManager
from loopscope.errors import RunNotice, StateMutationError, UsageError
from loopscope.isolation import Call, Isolation, StateCopy, undone_in_modules
from loopscope.isolation.tripwire import Audit
from loopscope.loops import epoch_loop
from loopscope.state import Part, TrainingState, Transient, Watched, differing
from loopscope.state.training_state import PARTS, without_on_demand
from loopscope.training import TrainingTask
from torch import Tensor, nn

from tests.framework.runs.small_experiment import Small, registered, session
from tests.support import Case, Saving, build

CALL = Call("spy", "POST_STEP", 1)


class Phase(Enum):
    """Phases of a module."""

    EARLY = 1
    LATE = 2


@dataclass
class Memory:
    """An object of a user's class."""

    total: float = 0.0
    seen: list[Any] = field(default_factory=list)


@dataclass(frozen=True)
class Recipe:
    """A shared, frozen object with a cached property."""

    name: str
    steps: dict[str, int]

    @cached_property
    def total(self) -> int:
        return sum(self.steps.values())


RECIPES = [Recipe("first", {"a": 1}), Recipe("second", {"a": 2})]


class Scratch(Transient):
    """Memory that no later step reads."""

    def __init__(self) -> None:
        self.calls = 0


class Counting(nn.Module):
    """A model whose outputs depend on plain attributes of every kind."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.calls = 0
        self.recent: deque[float] = deque(maxlen=2)
        self.table: dict[Any, Any] = {"mean": torch.zeros(2), 3: [torch.zeros(1)]}
        self.shared = [0.0]
        self.also_shared = self.shared
        self.memory, self.scratch = Memory(), Scratch()
        self.phase = Phase.EARLY
        self.scale = np.sqrt(2.0)
        self.hidden = [nn.BatchNorm1d(4)]
        self.names = {"b", "a"}
        self.history: Any = None
        self.act = torch.tanh
        self.recipe = RECIPES[0]

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
            self.scratch.calls += 1
            self.recent.append(float(self.calls))
            self.table["mean"].add_(inputs.detach().mean())
            self.table[3].append(self.table["mean"].clone())
            self.shared[0] += 0.5
            self.memory.total += 0.25
            self.memory.seen.append((self.calls, OrderedDict(last=self.calls)))
            self.recipe = RECIPES[int(self.calls > 4)]
            self.phase = Phase.LATE if self.calls > 4 else Phase.EARLY
            self.scale = self.scale * np.float64(1.01)
            self.names.add(str(self.calls))
            self.history = [self.history, self.calls] if self.calls < 9 else self.history
        kept = sum(self.recent) + self.also_shared[0] + self.memory.total + len(self.names)
        kept += self.phase.value + self.recipe.total
        outputs = self.inner(self.hidden[0](inputs) if self.training else inputs)
        return self.act(outputs) * (1 + 0.01 * self.calls + 0.001 * kept * float(self.scale)) + self.table["mean"].sum()


def counting_build(length: int = 4) -> tuple[TrainingTask, TrainingState]:
    task, state = build(Case(), length=length)
    task.model = Counting(task.model)
    return task, TrainingState(task.model, task.optimizer, state.streams, scheduler=state.scheduler)


def trained(path: Path | None = None) -> dict[str, int]:
    task, state = counting_build()
    manager = HookManager([], task, state)
    save = lambda: save_checkpoint(path / str(state.loop.step), state, {}, manager.isolation.run_streams)
    epoch_loop(task, manager, pauses=Saving(manager, 0 if path is None else 2, save))
    return without_on_demand(state.digest())


@pytest.mark.longer
@pytest.mark.guarantee("resumed-runs-are-identical")
def test_resumed_run_restores_module_attributes(tmp_path: Path) -> None:
    """Plain attributes, enums, deques and shared objects match those of the uninterrupted run."""
    whole = trained()
    assert trained(tmp_path) == whole
    task, state = counting_build()
    load_checkpoint(tmp_path / "6", state)
    assert (task.model.calls, task.model.phase, task.model.scratch.calls) == (6, Phase.LATE, 0)
    assert task.model.shared is task.model.also_shared
    assert (task.model.recipe, RECIPES[0].name) == (RECIPES[1], "first")
    assert task.model.recent == deque([5.0, 6.0], maxlen=2)
    epoch_loop(task, HookManager([], task, state))
    assert differing(whole, without_on_demand(state.digest())) == []
    assert task.model.calls == 12


def test_reading_a_checkpoint_of_attributes_executes_no_code(tmp_path: Path) -> None:
    trained(tmp_path)
    stored = open_checkpoint(tmp_path / "6").content()["state"]["modules"]
    assert stored[".calls"] == 6
    assert stored[".act"] == {"code": "torch._VariableFunctionsClass.tanh"}
    assert stored[".also_shared"] == {"again": stored[".also_shared"]["again"]}


MUTATIONS = {
    ".calls": lambda model: setattr(model, "calls", 99),
    ".recent": lambda model: model.recent.append(7.0),
    ".table": lambda model: model.table.update(new=1),
    ".memory": lambda model: setattr(model.memory, "total", 99.0),
    ".phase": lambda model: setattr(model, "phase", Phase.LATE),
    ".names": lambda model: model.names.add("c"),
    ".hidden": lambda model: setattr(model.hidden[0], "eps", 0.5),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_attribute_changes_are_detected_and_reverted(name: str) -> None:
    """The digest, tripwire and audit detect a changed module attribute, and a snapshot restores it."""
    task, state = counting_build()
    before = state.digest()
    snapshot = StateCopy().save(state)
    MUTATIONS[name](task.model)
    assert [entry.startswith(f"modules/{name}") for entry in differing(before, state.digest())][:1] == [True]
    snapshot.restore(state)
    assert differing(before, state.digest()) == []
    isolation, audit = Isolation(state), Audit(state, enabled=True)
    audit.take_baseline()
    with pytest.raises(StateMutationError, match=r"changed the training state: ."), isolation.visit():
        isolation.observe(CALL, lambda: MUTATIONS[name](task.model))
    with pytest.raises(StateMutationError, match=rf"modules/\{name}"):
        audit.check("The caller")


def test_evaluation_changes_to_attributes_are_reverted() -> None:
    """Containers and objects of modules that an evaluation changes are restored afterwards."""
    task, state = counting_build()
    before = state.digest()
    with undone_in_modules([task.model]):
        for mutation in MUTATIONS.values():
            mutation(task.model)
    assert differing(before, state.digest()) == []


def test_transient_objects_are_not_watched() -> None:
    """An observer may change a transient object, and the digest of the state is unchanged."""
    task, state = counting_build()
    before, isolation = state.digest(), Isolation(state)
    with isolation.visit():
        isolation.observe(CALL, lambda: setattr(task.model.scratch, "calls", 3))
    assert differing(before, state.digest()) == []


def test_training_between_dispatches_is_no_mutation() -> None:
    """Attributes that the model itself changes between two visits do not trigger the tripwire."""
    task, state = counting_build()
    isolation = Isolation(state)
    for _ in range(3):
        task.model.train()(torch.randn(4, 4))
        with isolation.visit():
            isolation.observe(CALL, lambda: None)


class Elsewhere:
    """An object that no other part of a training state reaches."""

    def __init__(self) -> None:
        self.kept = {"tensor": torch.zeros(3)}
        self.number = 0


class MadeUp(Part):
    """A part that a contributor adds: one class."""

    name = "made up"
    is_stored = True

    def __init__(self, place: Elsewhere) -> None:
        self.place = place

    def read(self, state: Any) -> Any:
        return (("made up/tensor", self.place.kept["tensor"]), ("made up/number", self.place.number))

    def persistent(self, state: Any) -> Any:
        return (self.place.kept,)

    def keep(self, state: Any, owners: Any) -> Any:
        return self.place.number

    def restore(self, state: Any, owners: Any, kept: Any) -> None:
        self.place.number = kept

    def watch(self, state: Any) -> Watched:
        return Watched([self.place.kept], read_values=lambda: (self.place.number,), label="the made-up number")

    def store(self, state: Any, streams: Any) -> Any:
        return {**self.place.kept, "number": self.place.number}

    def load(self, state: Any, stored: Any) -> None:
        self.place.kept["tensor"].copy_(stored["tensor"])
        self.place.number = stored["number"]

    def misfit(self, state: Any, stored: Any) -> str:
        return "" if stored.keys() == {"tensor", "number"} else "was written for another place"


def with_made_up() -> tuple[Elsewhere, TrainingState]:
    place, (task, state) = Elsewhere(), build(Case())
    return place, TrainingState(task.model, task.optimizer, state.streams, parts=(*PARTS, MadeUp(place)))


CHANGES = {"tensor": lambda place: place.kept["tensor"].add_(1), "number": lambda place: setattr(place, "number", 5)}


@pytest.mark.guarantee("observers-change-nothing", "interventions-are-undone")
@pytest.mark.parametrize("name", CHANGES)
def test_custom_part_is_watched_and_restored(name: str) -> None:
    """The digest, tripwire and audit detect a change in an added part, and a snapshot restores it."""
    place, state = with_made_up()
    before, snapshot = state.digest(), StateCopy().save(state)
    CHANGES[name](place)
    assert differing(before, state.digest()) == [f"made up/{name}"]
    snapshot.restore(state)
    assert differing(before, state.digest()) == []
    isolation, audit = Isolation(state), Audit(state, enabled=True)
    audit.take_baseline()
    with pytest.raises(StateMutationError, match=r"made.up"), isolation.visit():
        isolation.observe(CALL, lambda: CHANGES[name](place))
    with pytest.raises(StateMutationError, match=f"made up/{name}"):
        audit.check("The caller")


@pytest.mark.guarantee("resumed-runs-are-identical")
def test_custom_part_is_checkpointed(tmp_path: Path) -> None:
    """A checkpoint restores an added part, and a build without this part refuses the checkpoint."""
    place, state = with_made_up()
    for change in CHANGES.values():
        change(place)
    save_checkpoint(tmp_path / "a", state, {}, state.streams.save())
    fresh, resumed = with_made_up()
    load_checkpoint(tmp_path / "a", resumed)
    assert (fresh.kept["tensor"].tolist(), fresh.number) == ([1.0, 1.0, 1.0], 5)
    with pytest.raises(UsageError, match="does not contain a complete training state"):
        load_checkpoint(tmp_path / "a", build(Case())[1])


# Unstorable values


class Opaque(BytesIO):
    """An object with an inaccessible state."""


class Holding(nn.Sequential):
    """A model with an attribute that a checkpoint cannot store."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.cache = {"found": [Opaque()]}


UNSTORABLE = {
    "numpy.ndarray": lambda: np.array([None]),
    "Opaque": Opaque,
    "itertools.count": count,
    "list_iterator": lambda: iter([1]),
    "_io.BytesIO": BytesIO,
}


@pytest.mark.parametrize("kind", UNSTORABLE)
def test_unstorable_attribute_is_refused_with_remedy(kind: str, tmp_path: Path) -> None:
    """The error names the attribute, its class and the remedies, and no checkpoint is written."""
    task, state = build(Case())
    task.model[0].kept = UNSTORABLE[kind]()
    with pytest.raises(
        UsageError,
        match=rf"modules/0\.kept is a \S*{kind}, which .* Use tensors, .*Transient\.register on its class\.$",
    ):
        save_checkpoint(tmp_path / "a", state, {}, state.streams.save())
    assert not (tmp_path / "a").exists()


def test_unstorable_state_of_extras_and_hooks_is_named(tmp_path: Path) -> None:
    _, state = build(Case())
    with pytest.raises(UsageError, match=r"hooks/mine/0 is a collections\.deque"):
        save_checkpoint(tmp_path / "a", state, {"mine": [deque()]}, state.streams.save())
    state.extras["strategy"].count = Opaque()
    with pytest.raises(UsageError, match=r"extras/strategy/count is a \S*Opaque"):
        save_checkpoint(tmp_path / "a", state, {}, state.streams.save())


class SmallHolding(Small):
    """The small experiment with a Holding model."""

    name = "small_holding"

    def build_model(self) -> nn.Module:
        return Holding(*super().build_model())


@pytest.mark.guarantee("mistakes-are-refused-early")
@pytest.mark.parametrize("option", [{"save_checkpoints": 1}, {"checkpoint_every_steps": 2}], ids=str)
def test_checkpointed_run_refuses_unstorable_state(option: Any, tmp_path: Path) -> None:
    """A run with checkpoints is refused at its start if the model has such state, and writes no file."""
    with registered(SmallHolding), pytest.raises(UsageError, match=r"modules/\.cache/.* is a \S*Opaque"):
        session(tmp_path, SmallHolding, strategies=["plain"], **option).run()
    assert [*tmp_path.rglob("*.*")] == []


def test_run_without_checkpoints_warns_and_trains(tmp_path: Path) -> None:
    """Without scheduled checkpoints, unstorable state causes a warning and the run completes."""
    with registered(SmallHolding), pytest.warns(RunNotice, match=r"No checkpoint can be written .* modules/\.cache/"):
        (summary,) = session(tmp_path, SmallHolding, strategies=["plain"]).run()
    assert summary["status"] == "completed"


class Config:
    """A configuration, as the libraries of models make them."""

    def __init__(self) -> None:
        self.width, self.names, self.nested = 4, {"a": [1, 2]}, {"dtype": torch.float32}
        self.own = self


def test_rebuilt_attributes_do_not_block_checkpoints(tmp_path: Path) -> None:
    """Functions, paths, locks, loggers and cyclic objects that the build makes again may stay on the model."""

    def made() -> TrainingState:
        task, state = build(Case())
        layer = task.model[0]
        layer.config = task.model[1].config = Config()
        layer.act, layer.kind, layer.place, layer.device = torch.relu, nn.Linear, Path("a"), torch.device("cpu")
        layer.partial, layer.logger = lambda x: x, __import__("logging").getLogger("a")
        layer.lock = __import__("threading").Lock()
        layer.parent = [task.model]
        return state

    state = made()
    before = state.digest()
    save_checkpoint(tmp_path / "a", state, {}, state.streams.save())
    fresh = made()
    load_checkpoint(tmp_path / "a", fresh)
    assert differing(before, fresh.digest()) == []
    assert fresh.model[0].config is fresh.model[1].config
    assert fresh.model[0].config.own is fresh.model[0].config


def test_object_missing_from_new_model_is_refused(tmp_path: Path) -> None:
    """An object that was added during the run, and that the new model lacks, raises a UsageError."""
    task, state = build(Case())
    task.model[0].late = Memory()
    save_checkpoint(tmp_path / "a", state, {}, state.streams.save())
    with pytest.raises(UsageError, match=r"does not fit this run: ValueError: .* stored one has .*Memory"):
        load_checkpoint(tmp_path / "a", build(Case())[1])


def test_parameters_of_optimizer_only_are_restored(tmp_path: Path) -> None:
    """A parameter that is in the optimizer but not in the model survives a checkpoint."""

    def made() -> tuple[TrainingState, nn.Parameter]:
        _, state = build(Case())
        own = nn.Parameter(torch.zeros(2))
        state.optimizer.add_param_group({"params": [own]})
        return state, own

    state, own = made()
    own.data.fill_(3)
    save_checkpoint(tmp_path / "a", state, {}, state.streams.save())
    fresh, own = made()
    load_checkpoint(tmp_path / "a", fresh)
    assert own.tolist() == [3.0, 3.0]
