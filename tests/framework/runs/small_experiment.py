"""A small experiment with dropout and batch statistics, in both loops, and helpers to run it and read its folder."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from loopscope.data import TensorLoader, fixed_order, random_order
from loopscope.experiments import GrokkingConfig, GrokkingRunner
from loopscope.hooks import ExperimentRegistry, HookRegistry, TrainingHook
from loopscope.runs import RunOptions, Session
from loopscope.sinks import CSVSink, JSONLSink
from torch import Tensor, nn

ROWS = 20
BATCH = 8
STEPS_PER_EPOCH = 3


@dataclass(frozen=True, kw_only=True)
class SmallConfig(GrokkingConfig):
    """Options of small, one of every type.

    Args:
        ratio: a number or nothing.
        mode: a word of two.
        folder: a path or nothing.
        label: any text.
        bright: a switch.
    """

    epochs: int = 2
    batch_size: int = BATCH
    lr: float = 1e-2
    target_acc: float = 1.0
    snapshot_every: int = 1
    ratio: float | None = None
    mode: Literal["fast", "exact"] = "fast"
    folder: Path | None = None
    label: str = "none"
    bright: bool = False


class Small(GrokkingRunner[SmallConfig]):
    """Classify two noisy classes."""

    name = "small"
    config_class = SmallConfig
    strategies = ("plain", "other-order", "clipped")
    presets = {"tiny": {"epochs": 1, "lr": 0.5}}

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 2))

    def data(self) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(self.config.seed)
        return torch.randn(ROWS, 4, generator=generator), torch.randint(2, (ROWS,), generator=generator)

    def build_loader(self, strategy: str) -> TensorLoader:
        order = fixed_order(torch.arange(ROWS)) if strategy == "other-order" else random_order(ROWS, self.config.seed)
        return TensorLoader(self.data(), self.config.batch_size, order)

    def evaluation_sets(self) -> dict[str, tuple[Tensor, Tensor]]:
        return {"val": self.data()}

    def should_stop(self, evaluation: Mapping[str, float]) -> bool:
        return False

    def strategy_hooks(self, strategy: str) -> Mapping[str, Mapping[str, Any]]:
        return {"grad_clip": {"max_norm": 0.5}} if strategy == "clipped" else {}


class SmallSteps(Small):
    """The same in the step loop."""

    name = "small_steps"
    loop = "step"
    strategies = ("plain",)

    @property
    def length(self) -> int:
        return STEPS_PER_EPOCH * self.config.epochs


@contextmanager
def registered(*entries: type[Any]) -> Iterator[None]:
    """Register hooks and experiments for the body."""
    owners = [(HookRegistry if issubclass(entry, TrainingHook) else ExperimentRegistry, entry) for entry in entries]
    try:
        for owner, entry in owners:
            owner.register(entry)
        yield
    finally:
        for owner, entry in owners:
            owner.unregister(entry.name)


def session(folder: Path, runner: type[Small] = Small, *, sinks: bool = True, **options: Any) -> Session:
    """Create a session of small; ``options`` are fields of its config and of RunOptions."""
    of_config = {name: options.pop(name) for name in list(options) if name in SmallConfig.__dataclass_fields__}
    make_sinks = (lambda: [CSVSink(), JSONLSink()]) if sinks else list
    return Session(runner(SmallConfig(output_dir=folder, **of_config)), RunOptions(**options), make_sinks)


def train(folder: Path, strategies: Sequence[str] = ("plain",), **options: Any) -> dict[str, Any]:
    """Run a session and return the last strategy's summary."""
    return session(folder, strategies=strategies, **options).run()[-1]


def read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def contents(folder: Path) -> dict[str, bytes]:
    """Return every file and folder below ``folder`` with its bytes."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b"a folder"
        for path in sorted(folder.rglob("*"))
    }
