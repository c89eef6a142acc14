"""Loops of libraries and scripts that attach did not write: groups never end them, and missed steps are reported."""

import copy
import io
import json
import pickle
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import loopscope
import pytest
import torch
from loopscope.errors import UsageError
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional
from torch.nn.utils import parametrizations, prune

from tests.support.cases import slow_unless

pytestmark = pytest.mark.filterwarnings("ignore::loopscope.hooks.Alert", "ignore::FutureWarning")
DATA = [(torch.randn(8, 6, generator=torch.Generator().manual_seed(1)), torch.arange(8) % 3)] * 4


def build(kind: Any = torch.optim.AdamW) -> tuple[nn.Sequential, Any]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))
    return net, kind(net.parameters(), lr=0.01)


def loss_of(net: nn.Module, batch: Any) -> Tensor:
    return functional.cross_entropy(net(batch[0]), batch[1])


def plain_steps(net: nn.Module, optimizer: Any) -> None:
    """Train as a library does that calls backward and step itself."""
    torch.manual_seed(1)
    for batch in DATA * 2:
        optimizer.zero_grad()
        loss_of(net, batch).backward()
        optimizer.step()


def closure_steps(net: nn.Module, optimizer: Any) -> None:
    """Train as Lightning does, whose steps all get a closure."""
    torch.manual_seed(1)
    for batch in DATA * 2:

        def closure(batch: Any = batch) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(net, batch)
            loss.backward()
            return loss

        optimizer.step(closure)


def weights(net: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in net.parameters()])


@pytest.mark.guarantee("attached-loops-keep-their-bytes")
@pytest.mark.parametrize("steps", [plain_steps, closure_steps])
@pytest.mark.parametrize(
    "group", [pytest.param(name, marks=slow_unless(name == "health")) for name in ("minimal", "health", "full")]
)
def test_groups_never_end_a_bare_loop(tmp_path: Path, group: str, steps: Callable[..., None]) -> None:
    """The weights of a loop without further calls are those without hooks, and its losses are recorded."""
    bare, ours = build(), build()
    steps(*bare)
    with loopscope.attach(*ours, with_hooks=group, loss=loss_of, out=tmp_path / "run", display="none"):
        steps(*ours)
    assert torch.equal(weights(bare[0]), weights(ours[0]))
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["status"] == "completed"
    assert "training_metrics" not in summary["hooks_left_out"]


def functional_steps(net: nn.Module, optimizer: Any) -> None:
    """Train as a library does that computes gradients by torch.func."""
    torch.manual_seed(1)
    for batch in DATA * 2:
        weights = {name: value.detach() for name, value in net.named_parameters()}
        gradients = torch.func.grad(lambda given, batch=batch: loss_of(partial(functional_call, net, given), batch))(
            weights
        )
        for name, parameter in net.named_parameters():
            parameter.grad = gradients[name]
        optimizer.step()


def updates(net: nn.Module, optimizer: Any) -> None:
    """Train as a library does whose optimizer holds the gradients."""
    for _ in DATA:
        optimizer.step()


@pytest.mark.parametrize(
    ("steps", "sentence"),
    [(functional_steps, "taps receive none"), (updates, "'gradient_flow' cannot run here, since it fires at")],
)
def test_named_hook_is_refused_in_a_bare_loop(tmp_path: Path, steps: Callable[..., None], sentence: str) -> None:
    """Where no backward passes can be seen, taps get nothing; where no gradients can, only updates are seen."""
    net, optimizer = build()
    scope = loopscope.attach(net, optimizer, hooks=["gradient_flow"], out=tmp_path / "run", display="none")
    with pytest.raises(UsageError, match=sentence):
        steps(net, optimizer)
    scope.close("failed")


def replaced_in_batches(folder: Path) -> None:
    """Replace the optimizer in a loop with batches of the scope."""
    net, optimizer = build()
    with loopscope.attach(net, optimizer, with_hooks="health", out=folder, display="none") as scope:
        for epoch in range(3):
            optimizer = torch.optim.SGD(net.parameters(), 0.05) if epoch == 1 else optimizer
            for batch in scope.batches(DATA):
                optimizer.zero_grad()
                scope.backward(loss_of(net, batch))
                optimizer.step()


def replaced_in_bare_loop(folder: Path) -> None:
    net, optimizer = build()
    with loopscope.attach(net, optimizer, with_hooks="health", out=folder, display="none"):
        plain_steps(net, optimizer)
        plain_steps(net, torch.optim.SGD(net.parameters(), 0.05))


@pytest.mark.parametrize("train", [replaced_in_batches, replaced_in_bare_loop])
def test_replaced_optimizer_is_a_finding(tmp_path: Path, train: Callable[[Path], None]) -> None:
    train(tmp_path / "run")
    findings = json.loads((tmp_path / "run/summary.json").read_text())["findings"]
    assert "optimizer-replaced" in [finding["id"] for finding in findings]
    assert not sys.modules["torch.optim.optimizer"]._global_optimizer_post_hooks


def test_optimizer_of_another_model_is_no_finding(tmp_path: Path) -> None:
    net, optimizer = build()
    with loopscope.attach(net, optimizer, with_hooks="health", out=tmp_path / "run", display="none"):
        plain_steps(net, optimizer)
        plain_steps(*build(torch.optim.SGD))
    assert "optimizer-replaced" not in (tmp_path / "run/summary.json").read_text()


def pruned(net: nn.Sequential, optimizer: Any) -> None:
    prune.l1_unstructured(net[0], "weight", amount=0.3)


def weight_normalised(net: nn.Sequential, optimizer: Any) -> None:
    parametrizations.weight_norm(net[0])


def orthogonal(net: nn.Sequential, optimizer: Any) -> None:
    parametrizations.orthogonal(net[0])


def with_more_outputs(net: nn.Sequential, optimizer: Any) -> None:
    """Replace the head by a larger one, as a vocabulary grows."""
    earlier = {id(parameter) for parameter in net[3].parameters()}
    net[3] = nn.Linear(16, 5)
    (group,) = optimizer.param_groups
    kept = [parameter for parameter in group["params"] if id(parameter) not in earlier]
    group["params"] = [*kept, *net[3].parameters()]


CHANGES = [pruned, weight_normalised, orthogonal, with_more_outputs]


def train_and_change(change: Callable[..., None], folder: Path | None = None, group: str = "") -> Tensor:
    """Train two epochs, and change the model in the first; with a folder, with all steps observed."""
    net, optimizer = build(torch.optim.SGD)
    options = {"loader": DATA, "loss": loss_of, "snapshot_every": 1, "display": "none"}
    options["hook_options"] = {"gradient_overflow": {"interval": 1}, "weight_average": {"interval": 1}}
    options["hook_options"] = {} if group == "health" else options["hook_options"]
    scope = None if folder is None else loopscope.attach(net, optimizer, with_hooks=group, out=folder, **options)
    for epoch in range(2):
        for index, batch in enumerate(scope.batches(DATA) if scope else DATA):
            scope.backward(loss_of(net, batch)) if scope else loss_of(net, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            if (epoch, index) == (0, 2):
                change(net, optimizer)
    if scope:
        scope.close()
    return weights(net)


@pytest.mark.guarantee("attached-loops-keep-their-bytes")
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("group", ["health", pytest.param("observers", marks=pytest.mark.slow)])
def test_model_that_changes_keeps_its_training(tmp_path: Path, change: Callable[..., None], group: str) -> None:
    """Hooks read the changed model, or are left out; the weights are those of the loop without hooks."""
    assert torch.equal(train_and_change(change), train_and_change(change, tmp_path / "run", group))
    assert json.loads((tmp_path / "run/summary.json").read_text())["status"] == "completed"


def scripted(net: nn.Module) -> nn.Module:
    return torch.jit.script(net)


def traced(net: nn.Module) -> nn.Module:
    return torch.jit.trace(net, DATA[0][0])


def saved(net: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(net, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def pickled(net: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(net))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("export", [scripted, traced, saved, pickled, copy.deepcopy])
def test_attached_model_can_be_exported(tmp_path: Path, export: Callable[[nn.Module], nn.Module]) -> None:
    """Exports within and between epochs compute what the model computes, and leave the training unchanged."""
    (net, optimizer), (bare, other) = build(), build()
    options = {"with_hooks": "health", "hook_options": {"activations": {"interval": 1}}}
    torch.manual_seed(1)
    with loopscope.attach(net, optimizer, out=tmp_path / "run", display="none", **options) as scope:
        for batch in scope.batches(DATA):
            scope.backward(loss_of(net, batch))
            optimizer.step()
            optimizer.zero_grad()
            with torch.random.fork_rng():
                copied = export(net.eval())
            assert torch.equal(copied(batch[0]), net(batch[0]))
            net.train()
    torch.manual_seed(1)
    for batch in DATA:
        loss_of(bare, batch).backward()
        other.step()
        other.zero_grad()
    assert torch.equal(weights(net), weights(bare))


def train_in_shared_memory(folder: Path) -> Any:
    """Train while the first weight also changes as by another process: without a new version."""
    net, optimizer = build()
    net.share_memory()
    written = torch.frombuffer(net[0].weight.detach().numpy(), dtype=torch.float32)
    with loopscope.attach(net, optimizer, with_hooks="health", out=folder, display="silent") as scope:
        for batch in scope.batches(DATA):
            scope.backward(loss_of(net, batch))
            written.mul_(1.001)
            optimizer.step()
            optimizer.zero_grad()
    return scope


@pytest.mark.filterwarnings("always::loopscope.errors.RunNotice")
def test_weights_in_shared_memory_are_reported(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert train_in_shared_memory(tmp_path / "run").last_metrics()
    assert "Weights are in shared memory" in " ".join("".join(capfd.readouterr()).split())


class Lookahead(torch.optim.Optimizer):
    """A wrapper whose groups are a property, as that of pytorch_optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer.param_groups, {})
        self.optimizer = optimizer
        del vars(self)["param_groups"]

    @property
    def param_groups(self) -> Any:
        return vars(self)["param_groups"] if "optimizer" not in vars(self) else self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: Any) -> None:
        vars(self)["param_groups"] = groups

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)


def test_refusing_hook_leaves_a_wrapper_unchanged(tmp_path: Path) -> None:
    """What a hook that raises has changed is undone, without a new attribute of the optimizer."""
    net, inner = build()
    optimizer = Lookahead(inner)
    options = {"with_hooks": "interventions", "loss": loss_of, "out": tmp_path / "run", "display": "none"}
    with loopscope.attach(net, optimizer, **options) as scope:
        for batch in scope.batches(DATA):
            scope.backward(loss_of(net, batch))
            optimizer.step()
            optimizer.zero_grad()
    assert "adam_dynamics" in json.loads((tmp_path / "run/summary.json").read_text())["hooks_left_out"]
