"""The first batch is read before an earlier run is removed, without an effect on the training."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from loopscope.data import Loader
from loopscope.errors import UsageError
from loopscope.hooks import HookPoint, InterventionHook, RunInfo, TrainingHook
from torch.utils.data import Dataset

from tests.framework.runs.small_experiment import BATCH, ROWS, STEPS_PER_EPOCH, Small, contents, registered, session

pytestmark = pytest.mark.longer


class Opaque:
    """A batch with inaccessible data."""

    def __init__(self, *data: Any) -> None:
        self.read = lambda: data


class Rows(Dataset):
    """Rows that count their requests."""

    def __init__(self, data: Any) -> None:
        self.data, self.asked = data, 0

    def __getitem__(self, rows: Any) -> Any:
        self.asked += 1
        inputs, targets = (part[rows] for part in self.data)
        return inputs * self.asked, targets


class Counting(Loader):
    """Yields batches that depend on all earlier draws: by counts, by generators of every kind, and by an order."""

    def __init__(self, data: Any, kind: Any) -> None:
        self.data, self.kind = Rows(data), kind
        self.drawn, self.order, self.counts = 0, [*range(ROWS)], {"batches": 0}
        self.own, self.numpy, self.torch = random.Random(1), np.random.default_rng(2), torch.Generator().manual_seed(3)

    def batches(self, epoch: int, start: int = 0) -> Iterator[Any]:
        for _ in range(start, STEPS_PER_EPOCH):
            self.drawn += 1
            self.counts["batches"] += 2
            self.own.shuffle(self.order)
            noise = self.numpy.normal() + torch.randn((), generator=self.torch) + torch.randn(()) + random.random()
            rows = self.order[self.drawn % 2 : BATCH]
            inputs, targets = self.data[rows]
            yield self.kind((inputs + 0.01 * float(noise) + self.counts["batches"], targets))

    def __len__(self) -> int:
        return STEPS_PER_EPOCH

    def shuffled(self, seed: int) -> Loader:
        return self


class Counted(Small):
    """The small experiment with this loader, and a state that counts the batches."""

    name = "counted"
    kind: type[Any] = tuple
    drawn = 0

    def build_loader(self, strategy: str) -> Any:
        self.loader = Counting(self.data(), self.counted)
        return self.loader

    @classmethod
    def counted(cls, batch: Any) -> Any:
        cls.drawn += 1
        return cls.kind(batch)

    def compute_loss(self, model: Any, batch: Any) -> Any:
        return super().compute_loss(model, batch.read()[0] if isinstance(batch, Opaque) else batch)

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": type(self).drawn}

    def load_state_dict(self, state: Any) -> None:
        type(self).drawn = state["drawn"]


class Acting(InterventionHook):
    """An intervention within steps that does nothing."""

    name = "acting"
    hook_points = {HookPoint.PRE_STEP}

    def intervene(self, run_ctx: Any, model_ctx: Any) -> dict[str, float]:
        return {}

    def describe_metrics(self) -> list[Any]:
        return []


class Looking(TrainingHook):
    """A hook that takes the first pass when it starts."""

    name = "looking"
    hook_points = {HookPoint.POST_EPOCH}

    def start(self, run: RunInfo) -> None:
        assert run.first_pass is not None
        run.first_pass()

    def compute(self, ctx: Any) -> dict[str, float]:
        return {}

    def describe_metrics(self) -> list[Any]:
        return []


def trained(folder: Path, *hooks: str, runner: type[Counted] = Counted, **options: Any) -> dict[str, torch.Tensor]:
    with registered(runner, Acting, Looking):
        runner.drawn = 0
        session(folder, runner, strategies=["plain"], hooks=hooks, **options).run()
    assert runner.drawn == 2 * STEPS_PER_EPOCH
    return torch.load(folder / runner.name / "plain/plain_final.pt")


@pytest.mark.guarantee("monitoring-changes-nothing")
@pytest.mark.parametrize("hook", ["acting", "looking"])
def test_stateful_loader_yields_the_same_batches(tmp_path: Path, hook: str) -> None:
    """The early look at the first batch does not advance a loader that counts its batches."""
    bare, hooked = trained(tmp_path / "bare"), trained(tmp_path / "hooked", hook)
    assert all(torch.equal(bare[name], hooked[name]) for name in bare)


@pytest.mark.guarantee("mistakes-are-refused-early")
def test_batch_without_rollback_is_refused_early(tmp_path: Path) -> None:
    """The error is raised before the files of an earlier run are removed."""
    opaque = type("Opaquely", (Counted,), {"kind": Opaque})
    trained(tmp_path, runner=opaque, save_checkpoints=1)
    before = contents(tmp_path)
    with pytest.raises(
        UsageError,
        match=r"'acting' changes the state within a step, and its changes are rolled back, but the batch \(Opaque\)",
    ):
        trained(tmp_path, "acting", runner=opaque, overwrite=True)
    assert contents(tmp_path) == before
    trained(tmp_path, runner=opaque, overwrite=True)
