"""Every shipped hook with layers whose weights are computed from other parameters."""

import json
import warnings

import loopscope
import pytest
import torch
from loopscope import TensorLoader, random_order
from loopscope.engine import HookManager
from loopscope.errors import RunNotice, UsageError
from loopscope.hooks.selection import bulk_hooks
from loopscope.loops import epoch_loop
from loopscope.state import RandomStreams, TrainingState
from loopscope.training import TrainingTask
from loopscope.training_hooks.lowbit.gradient_overflow import GradientOverflow
from torch import nn
from torch.nn.utils import parametrizations, prune, spectral_norm, weight_norm

from tests.support.cases import FEW_PASSES

pytestmark = pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")
EPOCHS = 2
WAYS = {
    "prune": lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
    "weight_norm": weight_norm,
    "spectral_norm": spectral_norm,
    "parametrizations.weight_norm": parametrizations.weight_norm,
    "parametrizations.spectral_norm": parametrizations.spectral_norm,
    "parametrizations.orthogonal": parametrizations.orthogonal,
}
NEEDS_OTHERS = {"counterfactual", "embedding_provenance", "gradient_projection"}
"""Hooks that need an epoch driven by loopscope, an embedding with its output projection, or a reference solution."""
NEEDS_THE_TABLE = {"fourier", "token_gradient"}


class Net(nn.Module):
    """A network in which ``change`` parametrizes the weights of an embedding, a block and the head."""

    def __init__(self, change) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(7, 4), nn.Linear(4, 7)
        self.blocks = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        for layer in (self.table, self.blocks[0], self.head):
            change(layer)

    def forward(self, tokens):
        hidden = self.table(tokens)
        for block in self.blocks:
            hidden = hidden + block(hidden).relu()
        return self.head((hidden + self.attention(hidden, hidden, hidden)[0]).mean(1))


def loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def trained(way: str, folder=None, **options) -> Net:
    """Train two epochs of two steps, with hooks attached if ``folder`` is given."""
    torch.manual_seed(0)
    model = Net(WAYS[way])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = (torch.randint(7, (8, 3)), torch.randint(7, (8,)))
    loader = TensorLoader(data, 4, random_order(8, seed=1))
    batches = [*loader]
    if folder is None:
        for batch in batches * EPOCHS:
            loss(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        return model
    evaluate = lambda model: {"train_acc": 0.0, "val_acc": 0.0}
    task_options = {"loop": "epoch", "loss": loss, "loader": loader, "evaluate": evaluate, "sinks": ["jsonl"]}
    with loopscope.attach(model, optimizer, out=folder, display="none", **task_options, **options) as scope:
        for _ in range(EPOCHS):
            for batch in scope.batches(batches):
                scope.backward(loss(model, batch))
                optimizer.step()
                optimizer.zero_grad()
    return model


@pytest.mark.longer
@pytest.mark.some_rows(3)
@pytest.mark.guarantee("errors-are-contained")
@pytest.mark.parametrize(
    ("way", "group"),
    [*((way, "observers") for way in WAYS), ("prune", "full"), ("parametrizations.spectral_norm", "full")],
)
def test_groups_serve_computed_weights(way: str, group: str, tmp_path) -> None:
    """No hook ends the run, only hooks that read the table are dropped, and every byte is that of a bare run."""
    options = {name: options for name, options in FEW_PASSES.items() if name in bulk_hooks(group)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = trained(way, tmp_path, with_hooks=group, hook_options=options)
    summary = json.loads((tmp_path / "summary.json").read_text())
    reasons = {name: reason for name, reason in summary["hooks_left_out"].items() if name not in NEEDS_OTHERS}
    assert summary["status"] == "completed"
    assert not [reason for reason in reasons.values() if " raised at " in reason]
    assert all("computed from others" in reasons[name] for name in NEEDS_THE_TABLE)
    bare = trained(way).state_dict()
    assert all(torch.equal(value, bare[name]) for name, value in model.state_dict().items())


@pytest.mark.longer
@pytest.mark.guarantee("attached-loops-keep-their-bytes")
@pytest.mark.parametrize("way", WAYS)
def test_starting_a_run_computes_no_weights(way: str, tmp_path) -> None:
    """The facts that the doctor reads at the start leave the buffers of a parametrization alone."""
    bare = trained(way).state_dict()
    model = trained(way, tmp_path, hooks=["training_checks"])
    assert all(torch.equal(value, bare[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("way", WAYS)
def test_gradient_overflow_names_skipped_layers(way: str) -> None:
    model = Net(WAYS[way])
    loader = TensorLoader((torch.randint(7, (8, 3)), torch.randint(7, (8,))), 4, random_order(8, seed=1))
    optimizer = torch.optim.SGD(model.parameters())
    task = TrainingTask(model, optimizer, loader, loss, evaluate=lambda model: {}, length=1)
    manager = HookManager([GradientOverflow()], task, TrainingState(model, optimizer, RandomStreams(1)))
    with pytest.warns(RunNotice, match=r"omits layers whose weights are computed .*: head, blocks\.0\."):
        epoch_loop(task, manager)
    assert any(name.startswith("gradient_overflow/") for name in manager.delivery.last())


def test_gradient_overflow_refuses_model_of_computed_weights(tmp_path) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    prune.l1_unstructured(model[0], "weight", 0.5)
    optimizer = torch.optim.SGD(model.parameters())
    scope = loopscope.attach(model, optimizer, hooks=["gradient_overflow"], out=tmp_path, display="none")
    with pytest.raises(UsageError, match=r"the model has neither, but layers whose weights are computed .*: 0"):
        next(iter(scope.batches([torch.ones(2, 4)])))
