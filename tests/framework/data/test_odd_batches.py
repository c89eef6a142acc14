"""Batches other than tuples of tensors: changes by hooks do not reach the run, and hooks receive copies."""

from collections import UserDict
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import loopscope
import pytest
import torch
from loopscope.data import Loader, TensorLoader, TorchLoader, fixed_order, micro_batches, rows, with_copied_batches
from loopscope.engine import HookManager
from loopscope.errors import LoopscopeError, StateMutationError, UsageError
from loopscope.hooks import HookPoint
from loopscope.loops import epoch_loop
from loopscope.state import RandomStreams, TrainingState, without_on_demand
from loopscope.training import TrainingTask
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, TensorDataset

from tests.support import ActingHook, ReadOnlyHook, SpyHook, at, differences
from tests.support.odd_batches import KINDS, ROWS, Fields, Frozen, Graph, Slots, Views, parts


def run(loader: Loader, *hooks: Any, audit: bool = True, **options: Any) -> dict[str, int]:
    """Train two epochs with hooks and return the digest of the end."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    loss = lambda model, batch: functional.cross_entropy(model(parts(batch)[0]), parts(batch)[1])
    task = TrainingTask(model, optimizer, loader, loss, length=2, **options)
    state = TrainingState(model, optimizer, RandomStreams(3))
    epoch_loop(task, HookManager(hooks, task, state, audit=audit))
    return without_on_demand(state.digest())


def write(batch: Any) -> None:
    """Write to a batch by every way that its kind has."""
    x, y = parts(batch)
    with torch.no_grad():
        x.mul_(2), y.zero_()
    if isinstance(batch, (dict, UserDict)):
        batch["x"], batch["new"] = torch.zeros(4, 3), 1
    elif isinstance(batch, list):
        batch[0]["x"][0] = torch.zeros(4, 3)
        batch.reverse()
    elif isinstance(batch, Graph):
        batch._store["x"] = torch.zeros(4, 3)
        batch.extra = 1
    elif isinstance(batch, (Fields, Slots, Frozen)):
        object.__setattr__(batch, "x", torch.zeros(4, 3))


@pytest.mark.some_rows(3)
@pytest.mark.guarantee("interventions-are-undone")
@pytest.mark.parametrize("point", [HookPoint.PRE_STEP, HookPoint.POST_STEP])
@pytest.mark.parametrize("kind", KINDS)
def test_intervention_writes_to_batch_are_reverted(kind: str, point: HookPoint) -> None:
    """Writes to batches of every kind leave the run identical to the run without hooks."""
    writing = at(ActingHook, point)(lambda run_ctx, model_ctx: write(run_ctx.batch_data))
    assert differences(run(Views(kind, kept=True), audit=False), run(Views(kind, kept=True), writing)) == []


@pytest.mark.parametrize("kind", KINDS)
def test_observer_writes_to_batch_are_caught(kind: str) -> None:
    """Observers and read-only hooks raise StateMutationError."""
    double = lambda ctx, *_: parts(ctx.batch_data)[0].mul_(2) and None
    for kind_of_hook in (SpyHook, ReadOnlyHook):
        with pytest.raises(StateMutationError, match="batch"):
            run(Views(kind), at(kind_of_hook, HookPoint.PRE_STEP)(double), audit="arrays" in kind)


def draw_and_write(ctx: Any) -> None:
    for loader in (ctx.loader, ctx.loader.shuffled(1)):
        for batch in loader.batches(0):
            write(batch)
    write(next(iter(ctx.loader)))


@pytest.mark.some_rows(3)
@pytest.mark.guarantee("monitoring-changes-nothing")
@pytest.mark.parametrize("kind", KINDS)
def test_writes_to_drawn_batches_leave_data_unchanged(kind: str) -> None:
    """Hooks that draw batches and write to them change neither the data nor the run."""
    loader = Views(kind)
    before = loader.data[0].clone()
    observer = at(SpyHook, HookPoint.POST_EPOCH)(draw_and_write)
    reader = at(ReadOnlyHook, HookPoint.POST_STEP)(lambda run_ctx, model_ctx: draw_and_write(model_ctx))
    shuffling = at(ActingHook, HookPoint.POST_EPOCH)(
        lambda run_ctx, model_ctx: [write(batch) for batch in model_ctx.get_shuffled_loader().batches(0)] and None
    )
    assert differences(run(Views(kind), audit=False), run(loader, observer, reader, shuffling)) == []
    assert torch.equal(before, loader.data[0])


class Writing(SpyHook):
    """A hook that writes into the batches of the run's loader before the first step."""

    name = "writing"

    def start(self, run: Any) -> None:
        again = replace(run, seed=1)
        assert not hasattr(run.task, "optimizer")
        assert again.task.loader is run.task.loader
        draw_and_write(again.task)


@pytest.mark.some_rows(3)
@pytest.mark.guarantee("monitoring-changes-nothing")
@pytest.mark.parametrize("kind", KINDS)
def test_writes_at_start_leave_data_unchanged(kind: str) -> None:
    """Batches that a hook changes in start() are copies."""
    loader = Views(kind)
    before = loader.data[0].clone()
    assert differences(run(Views(kind), audit=False), run(loader, Writing())) == []
    assert torch.equal(before, loader.data[0])


def test_copied_view_uses_only_its_own_memory() -> None:
    """The copy of a batch that is a view does not copy the whole base tensor."""
    loader = Views("UserDict")
    drawn = next(iter(with_copied_batches(loader)))
    assert drawn["x"].untyped_storage().nbytes() == drawn["x"].nbytes
    assert with_copied_batches(loader).data is loader.data


class Items(Dataset):
    """Views of rows, several at once."""

    def __init__(self, data: Tensor) -> None:
        self.data = data

    def __getitem__(self, index: int) -> Tensor:
        return self.data[index : index + 2]

    def __len__(self) -> int:
        return 4


def test_only_loaders_that_share_data_are_copied() -> None:
    """Loaders that build new tensors per batch are passed on as they are; other loaders yield copies."""
    data = torch.randn(ROWS, 3)
    gathering = TensorLoader((data,), 4, fixed_order(torch.arange(ROWS)))
    stacking = TorchLoader(DataLoader(TensorDataset(data), batch_size=2), 0)
    showing = TorchLoader(DataLoader(Items(data), batch_size=None), 0)
    assert with_copied_batches(gathering) is gathering
    assert with_copied_batches(stacking) is stacking
    before = data.clone()
    for loader in (gathering, stacking, showing):
        for batch in with_copied_batches(loader):
            (batch if isinstance(batch, Tensor) else batch[0]).zero_()
    assert torch.equal(data, before)


def test_opaque_batch_is_refused_for_interventions() -> None:
    """An intervention within a step raises a UsageError, while hooks that only read are accepted."""
    writing = at(ActingHook, HookPoint.PRE_STEP, needs_pre_epoch_state=False)(lambda *ctx: None)
    with pytest.raises(UsageError, match=r"'acting' changes the state within a step, .* the batch \(Opaque\) contains"):
        run(Views("opaque"), writing)
    looking = [at(SpyHook, HookPoint.PRE_STEP)(), at(ReadOnlyHook, HookPoint.PRE_STEP)(lambda *ctx: None)]
    assert differences(run(Views("opaque"), audit=False), run(Views("opaque"), *looking)) == []


TEXTS: dict[str, Any] = {
    "rows of prompts": [{"prompt": "the cat", "length": 3.0}, {"prompt": "a dog", "length": 2.0}],
    "columns": {"prompt": ["the cat", "a dog"], "length": [3.0, 2.0]},
    "pairs": (["the cat", "a dog"], [3.0, None]),
    "texts": ["the cat", "a dog"],
}
"""Batches without a tensor: the arguments of a tokenizer."""


def spoil_texts(run_ctx: Any, model_ctx: Any) -> None:
    """Change a batch of texts in all of its containers."""
    batch = run_ctx.batch_data
    for item in (batch, *(batch.values() if isinstance(batch, dict) else batch)):
        if isinstance(item, dict):
            item["prompt"] = "spoilt"
        elif isinstance(item, list):
            item.append("spoilt")


@pytest.mark.parametrize("kind", TEXTS)
def test_interventions_restore_batches_of_texts(kind: str, tmp_path: Path) -> None:
    """An intervention is accepted, and what it writes to the texts is rolled back."""
    seen: list[str] = []
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    writing = at(ActingHook, HookPoint.PRE_STEP, HookPoint.POST_BACKWARD, needs_pre_epoch_state=False)(spoil_texts)
    with loopscope.attach(model, optimizer, hooks=[writing], out=tmp_path, display="none") as scope:
        for batch in scope.batches([deepcopy(TEXTS[kind]) for _ in range(2)]):
            seen.append(str(batch))
            scope.backward(model(torch.full((2,), float(len(str(batch))))).sum())
            optimizer.step()
            seen.append(str(batch))
    assert seen == [str(TEXTS[kind])] * 4


@pytest.mark.some_rows(3)
@pytest.mark.parametrize(
    "kind", ["dict", "UserDict", "dataclass", "slots", "nested", "encoding", "tuple", "arrays", "nested arrays"]
)
def test_batches_of_these_kinds_are_counted_and_split(kind: str) -> None:
    batch = next(iter(Views(kind)))
    assert rows(batch) == 4
    pieces = [parts(piece) for piece in micro_batches(batch, 2)]
    assert torch.equal(torch.cat([x for x, _ in pieces]), parts(batch)[0])
    bare, hooked = (run(Views(kind), *hooks, accumulation_steps=2) for hooks in ([], [at(SpyHook)()]))
    assert differences(bare, hooked) == []


def test_unsplittable_batch_object_is_refused() -> None:
    """Splitting a batch with an unknown object that contains tensors raises an error with its class."""
    with pytest.raises(LoopscopeError, match="A batch with a Graph cannot be split into micro-batches; set"):
        micro_batches(next(iter(Views("object"))), 2)


def test_sparse_batch_is_not_split():
    """Splitting a batch with a sparse tensor raises an error with its layout."""
    with pytest.raises(LoopscopeError, match=r"tensor of layout torch.sparse_coo cannot be split into micro-batches"):
        micro_batches((torch.eye(4).to_sparse(), torch.ones(4)), 2)
