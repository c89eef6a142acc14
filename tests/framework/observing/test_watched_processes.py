"""The trainings that a watched process finds, in loops with more than one optimizer over the same weights."""

import copy
import json
import pickle
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import loopscope
import pytest
import torch
from loopscope.errors import UsageError
from loopscope.integrations import attached_loop
from loopscope.integrations.attached_loop import close_open_runs
from loopscope.integrations.observed_optimizer import observe_steps
from loopscope.integrations.watched_process import WatchedProcess
from torch import nn
from torch.nn.functional import mse_loss

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


class Watched:
    """A watched process, and the optimizers that a test creates in it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        options = {"with_hooks": "minimal", "display": "none", "out": str(folder / "run")}
        self.process = WatchedProcess(options)

    def new(self, kind: Any, model: nn.Module, **options: Any) -> Any:
        """Create an optimizer."""
        optimizer = kind(model.parameters(), 0.01, **options)
        self.process.wait_for(optimizer)
        return optimizer

    def steps(self) -> list[int]:
        """Return the numbers of steps of all records, oldest first."""
        close_open_runs("completed", None)
        records = sorted(self._folder.glob("*/summary.json"), key=lambda path: (len(path.parent.name), path))
        return [json.loads(path.read_text())["steps"] for path in records]

    def losses(self) -> list[list[float]]:
        """Return the losses of the steps of every record."""
        found = []
        for path in self._folder.glob("*/run*.jsonl"):
            lines = map(json.loads, path.read_text().splitlines())
            series = [line["training_metrics/loss"]["values"] for line in lines if "training_metrics/loss" in line]
            found.append([value for values in series for value in values])
        return found


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    """Return a watched process, whose hooks are removed after the test."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setenv("LOOPSCOPE_WATCH_COMMAND", json.dumps({"command": ["python", "train.py"]}))
    monkeypatch.setattr(attached_loop, "END_OF_PROCESS", [])
    monkeypatch.setattr("loopscope.integrations.watched_process.END_OF_PROCESS", [])
    found = Watched(tmp_path)
    yield found
    close_open_runs("completed", None)
    for handle in (*found.process._pass_handles, *found.process._step_handles):
        handle.remove()


def loss_of(model: nn.Module) -> torch.Tensor:
    """Return the loss of a drawn batch."""
    inputs = torch.randn(8, 4)
    return mse_loss(model(inputs), inputs[:, :1])


def step(model: nn.Module, optimizer: Any) -> float:
    """Train for one step, with a closure if the optimizer needs one; return the loss."""

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        return loss

    if isinstance(optimizer, torch.optim.LBFGS):
        return float(optimizer.step(closure).detach())
    loss = closure()
    optimizer.step()
    return loss.item()


@pytest.mark.longer
@pytest.mark.parametrize("second", [torch.optim.LBFGS, torch.optim.SGD])
@pytest.mark.parametrize("created", ["late", "early", "first"])
def test_next_optimizer_has_the_next_record(watched: Watched, second: Any, created: str) -> None:
    """It is created after the steps of the first one, between it and them, or before the first one."""
    model = nn.Linear(4, 1)
    following = watched.new(second, model) if created == "first" else None
    first = watched.new(torch.optim.Adam, model)
    following = watched.new(second, model) if created == "early" else following
    for _ in range(12):
        step(model, first)
    following = following or watched.new(second, model)
    losses = [step(model, following) for _ in range(3)]
    assert sorted(watched.steps()) == [3, 12]
    if second is torch.optim.LBFGS:  # with a closure, also its first step is observed
        assert losses in watched.losses()


def test_alternating_optimizers_keep_their_records(watched: Watched) -> None:
    model = nn.Linear(4, 1)
    first, second = watched.new(torch.optim.SGD, model), watched.new(torch.optim.SGD, model)
    for _ in range(12):
        step(model, first)
        step(model, second)
    assert watched.steps() == [12, 12]


def test_inner_loops_over_copies_have_no_record(watched: Watched) -> None:
    """The only record is that of the outer optimizer, whose gradients the loop sets."""
    model = nn.Linear(4, 1)
    outer = watched.new(torch.optim.Adam, model)
    for _ in range(5):
        outer.zero_grad()
        learner = copy.deepcopy(model)
        inner = watched.new(torch.optim.SGD, learner)
        for _ in range(3):
            step(learner, inner)
        gradients = torch.autograd.grad(loss_of(learner), [*learner.parameters()])
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient
        outer.step()
    assert watched.steps() == [5]


def test_long_training_of_a_copy_is_recorded(watched: Watched) -> None:
    """Its steps are counted from the first one."""
    model = nn.Linear(4, 1)
    outer, learner = watched.new(torch.optim.Adam, model), copy.deepcopy(model)
    inner = watched.new(torch.optim.SGD, learner)
    for _ in range(25):
        step(learner, inner)
    assert watched.steps() == [25]
    assert not outer.state


@pytest.mark.longer
def test_training_of_a_part_has_the_part(watched: Watched) -> None:
    """The actor of a policy has a separate optimizer; its layers are called, not the actor itself."""
    actor, critic = (nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)) for _ in range(2))
    policy = nn.ModuleDict({"actor": actor, "critic": critic})
    optimizers = [watched.new(torch.optim.SGD, part) for part in (actor, critic)]
    for _ in range(3):
        for part, optimizer in zip((actor, critic), optimizers, strict=True):
            optimizer.zero_grad()
            part[1](part[0](torch.randn(8, 4))).mean().backward()
            optimizer.step()
    models = [scope._attached.driver.task.model for scope in watched.process._scopes]
    assert [model is part for model, part in zip(models, policy.values(), strict=True)] == [True, True]
    assert watched.steps() == [3, 3]


@pytest.mark.longer
def test_many_brief_trainings_have_few_records(watched: Watched) -> None:
    """A loop with a new optimizer in every round, as in federated learning."""
    model = nn.Linear(4, 1)
    for _ in range(8):
        optimizer = watched.new(torch.optim.SGD, model)
        for _ in range(2):
            step(model, optimizer)
    assert watched.steps() == [2, 2, 2, 2]


def test_failure_to_begin_never_reaches_the_loop(
    watched: Watched, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("loopscope.integrations.waiting_optimizers.optimizers_over", None)
    model = nn.Linear(4, 1)
    optimizer = watched.new(torch.optim.SGD, model)
    for _ in range(3):
        step(model, optimizer)
    assert capsys.readouterr().err.count("continue without loopscope") == 1
    assert watched.steps() == []


class Momentum:
    """Gradient descent with momentum by an object that is no optimizer of torch, as fastai has them."""

    def __init__(self, model: nn.Module) -> None:
        self.options, self.parameters = {"lr": 0.01}, [*model.parameters()]
        self.moments = [torch.zeros_like(item) for item in self.parameters]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [{"params": self.parameters, **self.options}]

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        for parameter, moment in zip(self.parameters, self.moments, strict=True):
            parameter.sub_(moment.mul_(0.9).add_(parameter.grad), alpha=self.options["lr"])


def test_optimizers_of_other_kinds_are_recorded(watched: Watched, tmp_path: Path) -> None:
    """Steps, losses and learning rates are recorded, the weights are those alone, and copies are as before."""
    weights, losses = [], list[float]()
    for is_watched in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        optimizer = Momentum(model)
        if is_watched:
            watched.process.wait_for(observe_steps(optimizer))
        losses = []
        for number in range(5):
            optimizer.options["lr"] = 0.01 * (number + 1)
            losses.append(step(model, optimizer))
        weights.append(torch.cat([item.detach().flatten() for item in model.parameters()]))
        assert pickle.loads(pickle.dumps(optimizer)).options == copy.deepcopy(optimizer).options == {"lr": 0.05}
    assert torch.equal(*weights)
    assert watched.steps() == [5]
    assert watched.losses() == [losses]
    rates = loopscope.read_run(tmp_path / "run").frame("training_metrics/lr").to_numpy().flatten().tolist()
    assert rates == pytest.approx([0.01, 0.02, 0.03, 0.04, 0.05])


def test_steps_of_other_kinds_are_not_repeated() -> None:
    """A hook that would step the optimizer does not know all of its state."""
    optimizer = Momentum(nn.Linear(4, 1))
    with pytest.raises(UsageError, match=r"The state of .*Momentum is not known, so its steps cannot be repeated"):
        observe_steps(optimizer).step()


@pytest.mark.compile
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_first_compiled_step_is_counted(watched: Watched) -> None:
    """The pass is within the compiled step; its losses are those of the loop from the second step on."""
    model = nn.Linear(4, 1)
    optimizer = watched.new(torch.optim.Adam, model)
    compiled = torch.compile(lambda: step(model, optimizer), backend="eager")
    for _ in range(4):
        compiled()
    assert watched.steps() == [4]


@pytest.mark.compile
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_compiled_model_leaves_no_warning_of_hooks(watched: Watched) -> None:
    """torch warns of hooks of all modules, which the script does not have."""
    model = torch.compile(nn.Linear(4, 1), backend="eager")
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        optimizer = watched.new(torch.optim.SGD, model)
        with torch.no_grad():
            model(torch.ones(8, 4))
        for _ in range(3):
            step(model, optimizer)
    assert [str(item.message) for item in found if "global hooks" in str(item.message)] == []
    assert watched.steps() == [3]


@pytest.mark.trainer
def test_trainers_with_a_callback_are_left(
    watched: Watched, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A Trainer that has loopscope.Callback keeps its options, and a Trainer that is refused leaves the next one."""
    trainer_class = pytest.importorskip("lightning.pytorch").Trainer
    options = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    own = trainer_class(callbacks=[loopscope.Callback(with_hooks="minimal")], **options)
    callbacks = [*own.callbacks]
    watched.process.attach_to(own)
    assert own.callbacks == callbacks
    assert capsys.readouterr().err.count("the script attaches loopscope itself, so watch adds no record.") == 1
    watched.process.attach_to(trainer_class(barebones=True))
    assert "allows no callbacks; omit it to attach hooks. This training continues" in capsys.readouterr().err
    following = trainer_class(**options, default_root_dir=tmp_path)
    watched.process.attach_to(following)
    assert len(following.callbacks) > len(trainer_class(**options).callbacks)


def test_unwritable_notes_leave_the_record(watched: Watched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file of ``loopscope watch`` may belong to another user, as of a command that changes its user."""
    monkeypatch.setenv("LOOPSCOPE_WATCH_STARTED", str(tmp_path / "missing" / "file"))
    model = nn.Linear(4, 1)
    optimizer = watched.new(torch.optim.SGD, model)
    for _ in range(3):
        step(model, optimizer)
    following = nn.Linear(4, 1)
    optimizer = watched.new(torch.optim.SGD, following)
    step(following, optimizer)
    assert watched.steps() == [3, 1]
