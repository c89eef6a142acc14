"""Evaluations that draw random numbers, move buffers or swap weights, isolated and with the script's side effects."""

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as lightning
import loopscope
import pytest
import torch
from loopscope.data import TensorLoader, fixed_order
from loopscope.engine import HookManager
from loopscope.errors import RunNotice, UsageError
from loopscope.loops import epoch_loop
from loopscope.state import RandomStreams, TrainingState
from loopscope.training import TrainingTask
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.framework.integrations.hf_trainers import Trace, same, trainer
from tests.framework.integrations.test_lightning import Classifier, fit
from tests.support.cases import some_of

pytestmark = [
    pytest.mark.trainer,
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"),
]
DATA = TensorDataset(torch.randn(24, 4, generator=torch.Generator().manual_seed(1)), torch.arange(24) % 3)
SENTENCE = "This evaluation drew random numbers"


class ScheduleFree(torch.optim.SGD):
    """Swaps the weights x and y by rounding interpolations, as schedule-free optimizers do."""

    def _move(self, weight: float, *, trains: bool) -> None:
        if self.param_groups[0].get("trains", True) is not trains:
            for parameter in self.param_groups[0]["params"]:
                momentum = self.state[parameter].get("momentum_buffer")
                if momentum is not None:
                    parameter.data.lerp_(momentum, weight)
        self.param_groups[0]["trains"] = trains

    def eval(self) -> None:
        self._move(1 - 1 / 0.9, trains=False)

    def train(self) -> None:
        self._move(1 - 0.9, trains=True)


def passes(net: nn.Module, loader: DataLoader[Any]) -> dict[str, float]:
    return {"val_loss": sum(float(nn.functional.cross_entropy(net(x), y)) for x, y in loader)}


def with_modes(net: nn.Module) -> dict[str, float]:
    """Evaluate in train mode, which moves the statistics of batch normalisation and draws for dropout."""
    with torch.no_grad():
        return {"val_loss": float(nn.functional.cross_entropy(net.train()(DATA[:][0]), DATA[:][1]))}


EVALUATIONS: dict[str, Callable[[nn.Module], dict[str, float]]] = {
    "a pass over a loader": lambda net: passes(net, DataLoader(DATA, 8)),
    "a shuffled pass": lambda net: passes(net, DataLoader(DATA, 8, shuffle=True)),
    "train mode": with_modes,
    "a functional dropout": lambda net: {"val_loss": float(nn.functional.dropout(net(DATA[:][0])).sum())},
}


def train(evaluate: Any = None, out: Path | None = None, kind: Any = None, **options: Any) -> list[list[Tensor]]:
    """Train a custom loop, and evaluate after every epoch; return the state after every step."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 3))
    optimizer: Any = (kind or torch.optim.SGD)(net.parameters(), lr=0.05, momentum=0.9)
    scope = out and loopscope.attach(
        net, optimizer, hooks=["norms"], out=out, audit=True, **{"display": "none"} | options
    )
    trace = []
    for _ in range(3):
        net.train()
        loader = DataLoader(DATA, 8, shuffle=True)
        for x, y in scope.batches(loader) if scope else loader:
            loss = nn.functional.cross_entropy(net(x), y)
            scope.backward(loss) if scope else loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            trace.append([value.clone() for value in (*net.state_dict().values(), torch.get_rng_state())])
        if evaluate:
            call = partial(evaluate, net, optimizer) if kind else partial(evaluate, net)
            scope.evaluate(call) if scope else call()
    if scope:
        scope.close()
    return trace


def equal(one: list[list[Tensor]], other: list[list[Tensor]]) -> bool:
    """Return whether two traces are equal bit for bit at every step."""
    pairs = [pair for steps in zip(one, other, strict=True) for pair in zip(*steps, strict=True)]
    return all(torch.equal(first, second) for first, second in pairs) and bool(pairs)


@pytest.mark.guarantee("attached-loops-keep-their-bytes")
@pytest.mark.parametrize("kind", EVALUATIONS)
def test_switch_keeps_side_effects_of_custom_loops(tmp_path: Path, kind: str) -> None:
    """With the switch the bits are those of the script that evaluates; by default those of one that does not."""
    evaluate = EVALUATIONS[kind]
    theirs, without = train(evaluate), train()
    assert not equal(theirs, without)
    assert equal(train(evaluate, tmp_path / "a", isolate_evaluation=False), theirs)
    assert equal(train(evaluate, tmp_path / "b"), without)


@pytest.mark.parametrize("evaluation", some_of(["epoch", "steps"]))
def test_switch_keeps_side_effects_of_hugging_face(tmp_path: Path, evaluation: str) -> None:
    def traced(folder: str, isolated: bool | None, **options: Any) -> Any:
        made = trainer(tmp_path / folder, trace := Trace(), **options)
        if isolated is not None:
            loopscope.attach(made, hooks=["norms"], display="none", isolate_evaluation=isolated)
        made.train()
        return trace.steps, torch.rand(3)

    evaluating = {"eval_strategy": evaluation, "eval_steps": 3}
    theirs = traced("theirs", None, **evaluating)
    assert same(traced("kept", False, **evaluating), theirs)
    assert same(traced("isolated", True, **evaluating), traced("without", None))
    assert not same(theirs, traced("again", None))


@pytest.mark.parametrize("options", [{}, {"val_check_interval": 2}, {"num_sanity_val_steps": 0}], ids=str)
def test_switch_keeps_side_effects_of_lightning(tmp_path: Path, options: dict[str, Any]) -> None:
    theirs, *_ = fit(tmp_path / "theirs", validate=True, **options)
    kept, *_ = fit(tmp_path / "a", ["norms"], validate=True, choices={"isolate_evaluation": False}, **options)
    isolated, *_ = fit(tmp_path / "b", ["norms"], validate=True, **options)
    assert kept == theirs
    assert isolated == fit(tmp_path / "c")[0]


@pytest.fixture
def notices_of(capsys: pytest.CaptureFixture[str]) -> Callable[[Callable[[], Any]], int]:
    """A function that returns the number of notices about random numbers."""

    def count(run: Callable[[], Any]) -> int:
        capsys.readouterr()
        with warnings.catch_warnings():
            warnings.simplefilter("always", RunNotice)
            run()
        output = capsys.readouterr()
        return (output.out + output.err).replace("\n", " ").count(SENTENCE)

    return count


@pytest.mark.slow
def test_drawing_evaluation_is_reported_once_per_run(tmp_path: Path, notices_of: Any) -> None:
    """Nothing is reported for an evaluation that draws nothing, or with the switch."""
    quiet = lambda net: passes(net, DataLoader(DATA, 8, generator=torch.Generator()))
    drawing, shown = EVALUATIONS["a pass over a loader"], {"display": "normal"}
    assert notices_of(lambda: train(drawing, tmp_path / "a", **shown)) == 1
    assert notices_of(lambda: train(drawing, tmp_path / "b", isolate_evaluation=False, **shown)) == 0
    assert notices_of(lambda: train(quiet, tmp_path / "c", **shown)) == 0


def test_trainers_report_drawing_evaluations_once(tmp_path: Path, notices_of: Any) -> None:
    """Lightning isolates its sanity check itself, so that is not reported."""
    made = trainer(tmp_path / "hf", eval_strategy="steps", eval_steps=3)
    loopscope.attach(made, hooks=["norms"])
    assert notices_of(made.train) == 1
    shown = {"choices": {"display": "normal"}, "validate": True}
    assert notices_of(partial(fit, tmp_path / "a", ["norms"], **shown)) == 1
    assert notices_of(partial(fit, tmp_path / "b", ["norms"], check_val_every_n_epoch=5, **shown)) == 0


def test_switch_must_be_true_or_false(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="isolate_evaluation is 'no'; it must be true or false"):
        train(None, tmp_path, isolate_evaluation="no")


def swapped(seen: list[Tensor], net: nn.Module, optimizer: Any) -> dict[str, float]:
    optimizer.eval()
    seen.append(net[0].weight.detach().clone())
    optimizer.train()
    return {"val_loss": 0.0}


def left_swapped(seen: list[Tensor], net: nn.Module, optimizer: Any) -> dict[str, float]:
    """Evaluate, and leave the return to the next training step."""
    optimizer.eval()
    return {"val_loss": 0.0}


def averaged(seen: list[Tensor], net: nn.Module, optimizer: Any) -> dict[str, float]:
    """Add a distance to the weights and subtract it again, as some averages of the weights do."""
    for sign in (1, -1):
        for parameter in net.parameters():
            parameter.data.add_(sign * 0.1 * parameter.data.abs() + sign)
    return {"val_loss": 0.0}


def replaced(seen: list[Tensor], net: nn.Module, optimizer: Any) -> dict[str, float]:
    for parameter in net.parameters():
        parameter.data = parameter.data * 2
    net[0].weight = nn.Parameter(torch.zeros(8, 4))
    return {"val_loss": 0.0}


@pytest.mark.guarantee("attached-loops-keep-their-bytes")
@pytest.mark.parametrize("evaluate", [swapped, left_swapped, averaged, replaced])
def test_swapped_weights_are_restored_exactly(tmp_path: Path, evaluate: Any) -> None:
    """An evaluation with the averaged weights of a schedule-free optimizer leaves no trace in the training."""
    seen: list[Tensor] = []
    found = train(partial(evaluate, seen), tmp_path, kind=ScheduleFree)
    assert equal(found, train(kind=ScheduleFree))
    assert all(not torch.equal(weight, found[2][0]) for weight in seen)


@pytest.mark.slow
@pytest.mark.guarantee("attached-loops-keep-their-bytes")
@pytest.mark.parametrize("isolated", [True, False])
def test_hugging_face_evaluates_swapped_weights(tmp_path: Path, isolated: bool) -> None:
    """The Trainer evaluates the swapped weights; isolated, the training is that without evaluations."""

    def train_hf(folder: str, hooks: bool, **options: Any) -> Any:
        made = trainer(tmp_path / folder, trace := Trace(), **options)
        made.optimizer = ScheduleFree(made.model.parameters(), lr=0.05, momentum=0.9)
        if hooks:
            loopscope.attach(made, hooks=["norms"], display="none", isolate_evaluation=isolated)
        made.train()
        losses = [row["eval_loss"] for row in made.state.log_history if "eval_loss" in row]
        return (trace.steps, torch.rand(3)), losses

    evaluating = {"eval_strategy": "steps", "eval_steps": 3}
    found, losses = train_hf("attached", True, **evaluating)
    wanted, bare_losses = train_hf("bare", False, **(evaluating if not isolated else {}))
    assert same(found, wanted)
    assert losses[0] == train_hf("first", False, **evaluating)[1][0]
    assert isolated or losses == bare_losses


class Swapping(lightning.Callback):
    """Validates with the optimizer's weights for evaluations."""

    def on_validation_epoch_start(self, trainer: Any, module: Any) -> None:
        trainer.optimizers[0].eval()

    def on_validation_epoch_end(self, trainer: Any, module: Any) -> None:
        trainer.optimizers[0].train()


class LeftSwapped(Swapping):
    """Leaves the return to the next training step."""

    def on_validation_epoch_end(self, trainer: Any, module: Any) -> None:
        pass


@pytest.mark.guarantee("attached-loops-keep-their-bytes")
@pytest.mark.parametrize("callback", [Swapping, LeftSwapped])
def test_lightning_restores_swapped_weights(tmp_path: Path, callback: Any) -> None:
    """A validation of Lightning with the averaged weights of a schedule-free optimizer leaves no trace."""
    options = {"module": partial(Classifier, optimizer=ScheduleFree, momentum=0.9, lr=0.05)}
    found, *_ = fit(tmp_path, ["norms"], validate=True, callbacks=[callback()], val_check_interval=2, **options)
    assert found == fit(tmp_path / "bare", **options)[0]


def test_experiments_restore_swapped_weights() -> None:
    """The evaluation of an experiment may also swap weights."""

    def final(every: int) -> list[Tensor]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3))
        optimizer: Any = ScheduleFree(net.parameters(), lr=0.05, momentum=0.9)
        loss = lambda net, batch: nn.functional.cross_entropy(net(batch[0]), batch[1])
        loader = TensorLoader(DATA[:], 8, fixed_order(torch.arange(24)))
        evaluate = partial(swapped, [], optimizer=optimizer)
        task = TrainingTask(net, optimizer, loader, loss, length=3, evaluate=evaluate, eval_every=every)
        epoch_loop(task, HookManager([], task, TrainingState(net, optimizer, RandomStreams(0))))
        return [parameter.detach() for parameter in net.parameters()]

    assert all(map(torch.equal, final(1), final(0)))
