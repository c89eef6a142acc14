"""Training data given to attach: streams, lists of batches, functions, and workers that persist."""

import json
import random
from functools import partial
from typing import Any

import loopscope
import numpy as np
import pytest
import torch
from loopscope.errors import UsageError
from loopscope.hooks import StepSchedule
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, IterableDataset, Sampler, TensorDataset, default_collate

QUIET: dict[str, Any] = {"display": "none", "overwrite": True}
BATCHES = [(torch.randn(8, 4, generator=torch.Generator().manual_seed(seed)), torch.arange(8) % 3) for seed in range(6)]
ROWS = tuple(torch.cat(columns[:3]) for columns in zip(*BATCHES, strict=True))
READERS = ["lr_probe", "step_history", "what_if", "sharpness", "gradient_noise_scale"]
EVERY_STEP = {name: StepSchedule(mode="stride", every_n_steps=1) for name in READERS if name != "sharpness"}


def loss_fn(model: nn.Module, batch: Any) -> Tensor:
    return cross_entropy(model(batch[0]), batch[1])


class Rows(IterableDataset[Any]):
    """A stream that keeps a position and a generator between its iterations."""

    def __init__(self, count: int = 15) -> None:
        self.count, self.position, self.generator = count, 0, torch.Generator().manual_seed(1)

    def __iter__(self):
        for _ in range(self.count):
            self.position += 1
            yield torch.randn(4, generator=self.generator) + self.position, self.position % 3


class SizedRows(Rows):
    def __len__(self) -> int:
        return self.count


class Reader:
    """Returns batches one after the other."""

    def __init__(self) -> None:
        self.position, self.random = 0, random.Random(0)

    def next_batch(self) -> Any:
        self.position += 1
        inputs, targets = BATCHES[self.position % 6]
        return inputs + self.random.random(), targets

    __call__ = next_batch


class Pool(Sampler[int]):
    """A sampler that takes rows from a list, which it fills again, and counts its passes."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.passes = 0

    def __iter__(self):
        self.passes += 1
        for _ in range(15):
            self.rows = self.rows or torch.randperm(24, generator=torch.Generator().manual_seed(self.passes)).tolist()
            yield self.rows.pop()

    def __len__(self) -> int:
        return 15


class Noise:
    """A transform with a generator and a counter."""

    def __init__(self) -> None:
        self.random, self.calls = random.Random(0), 0

    def __call__(self, rows: Any) -> Any:
        self.calls += 1
        inputs, targets = default_collate(rows)
        return inputs + self.random.random() + self.calls, targets


class Noisy(TensorDataset):
    """Rows with a transform in a list."""

    def __init__(self) -> None:
        super().__init__(*ROWS)
        self.transforms = [Noise()]

    def __getitem__(self, index: Any) -> Any:
        inputs, targets = self.transforms[0]([super().__getitem__(index)])
        return inputs[0], targets[0]


GENERATOR = torch.Generator()
POSITION = 0


def draw(part: str) -> Any:
    return BATCHES[int(torch.randint(6, (), generator=GENERATOR)) % len(part)]


def advance() -> Any:
    global POSITION
    POSITION += 1
    return BATCHES[POSITION % 6]


def enclosed() -> Any:
    count, generator = 0, np.random.default_rng(0)

    def get_batch() -> Any:
        nonlocal count
        count += 1
        return BATCHES[int(generator.integers(6)) if count % 2 else 0]

    return get_batch


GIVEN: dict[str, Any] = {
    "stream": lambda: DataLoader(Rows(), batch_size=5),
    "sized stream": lambda: DataLoader(SizedRows(), batch_size=5),
    "custom sampler": lambda: DataLoader(TensorDataset(*ROWS), batch_size=5, sampler=Pool()),
    "transform": lambda: DataLoader(Noisy(), batch_size=8, shuffle=True),
    "collate function": lambda: DataLoader(TensorDataset(*ROWS), batch_size=8, collate_fn=Noise()),
    "list": lambda: [*BATCHES],
    "global streams": lambda: lambda: BATCHES[(int(torch.randint(6, ())) + random.randint(0, 5)) % 6],
    "generator": lambda: partial(draw, "part"),
    "function of a function": lambda: lambda: draw("parts"),
    "global position": lambda: advance,
    "enclosed position": enclosed,
    "method": lambda: Reader().next_batch,
    "callable": Reader,
}


def train(given: Any, out: Any = None, count: int = 3, **options: Any) -> bytes:
    """Train on batches of ``given``, with hooks if ``out`` is a folder, and return weights and generators."""
    torch.manual_seed(0)
    random.seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    scope: Any = None
    if out is not None:
        scope = loopscope.attach(model, optimizer, loss=loss_fn, loader=given, out=out, **QUIET, **options)
    for _ in range(2):
        batches = (given() for _ in range(count)) if callable(given) else given
        for batch in scope.batches(batches) if scope else batches:
            loss = loss_fn(model, batch)
            scope.backward(loss) if scope else loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    if scope:
        scope.close()
    weights = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    return weights + torch.get_rng_state().numpy().tobytes() + repr(random.getstate()).encode()


@pytest.mark.slow_rows(
    "global position", "callable", "global streams", "enclosed position", "generator", "function of a function"
)
@pytest.mark.guarantee("attached-loops-keep-their-bytes")
@pytest.mark.some_rows(3)
@pytest.mark.parametrize("kind", GIVEN)
@pytest.mark.process
def test_hooks_read_given_data_without_traces(tmp_path, monkeypatch, kind):
    """Hooks that read the data at every step take no batch, position or random number from the training."""
    results = []
    for out in (None, tmp_path / "run"):
        monkeypatch.setattr(f"{__name__}.POSITION", 0)
        GENERATOR.manual_seed(1)
        results.append(train(GIVEN[kind](), out, hooks=[*EVERY_STEP], schedules=EVERY_STEP))
    assert results[0] == results[1]


def test_uncopyable_sampler_is_refused(tmp_path):
    """A sampler whose position cannot be copied is refused before the first step."""
    sampler = Pool()
    sampler.source = (row for row in range(15))
    with pytest.raises(UsageError, match=r"sampler of loader= \(Pool\) cannot be copied .*; give a list of batches"):
        train(DataLoader(TensorDataset(*ROWS), batch_size=5, sampler=sampler), tmp_path / "run", hooks=["what_if"])


def scaling_loss(model: nn.Module, batch: Any) -> Tensor:
    """Return the loss of a batch that it scales in place."""
    return loss_fn(model, (batch[0].mul_(1.1), batch[1]))


def popping_loss(model: nn.Module, batch: Any) -> Tensor:
    """Return the loss of a batch without its last entry."""
    return loss_fn(model, (batch[0], batch.pop()))


def late_scaling_loss(model: nn.Module, batch: Any) -> Tensor:
    """Return the loss of a batch that it scales in place, unless it is the first one."""
    return loss_fn(model, batch) if torch.equal(batch[0], BATCHES[0][0]) else scaling_loss(model, batch)


@pytest.mark.parametrize("loss", [scaling_loss, popping_loss, late_scaling_loss])
@pytest.mark.parametrize("hooks", [["hessian"], ["gradient_noise_scale"]])
def test_losses_that_write_to_batches_are_repeated(tmp_path, loss, hooks):
    """Hooks compute losses that write to their batch on copies, also the one that looks for other modules."""
    seen = []
    for out in (None, tmp_path / "run"):
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        optimizer = torch.optim.Adam(model.parameters(), 1e-2)
        data = [[inputs.clone(), targets] for inputs, targets in BATCHES]
        options: dict[str, Any] = {"hooks": hooks, "loss": loss, "loader": [*BATCHES], "on_hook_error": "skip", **QUIET}
        scope: Any = loopscope.attach(model, optimizer, out=out, **options) if out else None
        for batch in scope.batches(data) if scope else data:
            result = loss(model, batch)
            scope.backward(result) if scope else result.backward()
            optimizer.step()
            optimizer.zero_grad()
        if scope:
            scope.close()
        seen.append([*(parameter.tolist() for parameter in model.parameters()), [len(batch) for batch in data]])
    assert seen[0] == seen[1]


@pytest.mark.longer
@pytest.mark.slow_rows("method-observers", "method-full")
@pytest.mark.some_rows(4)
@pytest.mark.parametrize("group", ["observers", "full"])
@pytest.mark.parametrize("kind", ["stream", "list", "method"])
def test_groups_run_on_given_data(tmp_path, kind, group):
    """The hooks of a group that read data are not left out."""
    train(GIVEN[kind](), tmp_path / "run", with_hooks=group, loop="step")
    left_out = json.loads((tmp_path / "run" / "summary.json").read_text())["hooks_left_out"]
    assert not {*READERS} & left_out.keys()


def read_once() -> Any:
    return next(ITERATOR)


ITERATOR = iter(BATCHES)


class OneIterator(IterableDataset[Any]):
    def __init__(self) -> None:
        self.rows = iter(range(9))

    def __iter__(self):
        return self.rows


REFUSED: dict[str, tuple[Any, str]] = {
    "generator": ((batch for batch in BATCHES), "loader is a generator, whose batches can be read only once"),
    "function of an iterator": (read_once, r"loader=read_once reads from a list_iterator, whose"),
    "method of an iterator": (iter(BATCHES).__next__, "loader=__next__ reads from a list_iterator, whose"),
    "stream of an iterator": (DataLoader(OneIterator()), "data set of loader= reads from a range_iterator, whose"),
    "an argument": (draw, "needs the argument 'part'; give one without arguments"),
    "a batch": (BATCHES[0], "loader is a tuple; it must be a DataLoader of torch, a list of batches"),
    "no batches": ([], "loader is an empty list"),
    "a model": (nn.Linear(1, 1), "loader is a Linear"),
    "a class": (Reader, "loader is a type"),
    "a data set": (TensorDataset(torch.ones(3)), "loader is a TensorDataset"),
}


@pytest.mark.guarantee("mistakes-are-refused-early")
@pytest.mark.parametrize("kind", REFUSED)
def test_other_data_are_refused_at_attach(tmp_path, kind):
    """Data that hooks cannot read without consuming them, and other objects, raise one sentence."""
    given, sentence = REFUSED[kind]
    with pytest.raises(UsageError, match=sentence):
        train(given, tmp_path / "run", hooks=["norms"])


@pytest.mark.longer
@pytest.mark.parametrize("given", [DataLoader([]), DataLoader(Rows(0)), DataLoader(SizedRows(0))])  # type: ignore[arg-type]
def test_empty_data_are_reported(tmp_path, given):
    """A hook that reads data without batches is refused by name, and left out of a group."""
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    options = {"loss": loss_fn, "loader": given, "out": tmp_path / "run", **QUIET}
    refused = pytest.raises(UsageError, match="loader= has no batches")
    with refused, loopscope.attach(model, optimizer, hooks=["gradient_noise_scale"], **options) as scope:
        next(scope.batches(BATCHES))
    with loopscope.attach(model, optimizer, with_hooks="observers", **options) as scope:
        next(scope.batches(BATCHES))
    left_out = json.loads((tmp_path / "run" / "summary.json").read_text())["hooks_left_out"]
    assert "loader= has no batches" in left_out["gradient_noise_scale"]


@pytest.mark.slow
@pytest.mark.process
def test_persistent_workers_are_accepted(tmp_path):
    """Hooks read with separate workers, so the training's keep their position."""

    def create() -> Any:
        data = TensorDataset(torch.randn(40, 4, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 3)
        return DataLoader(data, batch_size=8, shuffle=True, num_workers=2, persistent_workers=True)

    schedules = {"lr_probe": StepSchedule(mode="stride", every_n_steps=3)}
    options = {"hooks": ["lr_probe"], "schedules": schedules, "hook_options": {"lr_probe": {}}}
    assert train(create(), tmp_path / "run", **options) == train(create())
