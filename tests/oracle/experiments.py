"""Experiments of the oracle: the same small training in the epoch loop and in the step loop."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from loopscope import ExperimentConfig, ExperimentRegistry, ExperimentRunner, TensorLoader, random_order
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR

from tests.oracle import models

EPOCHS, STEPS = 4, 16
CRASHES: list[int] = []
"""The evaluations at which a run ends as if its process had died; set by the resumed case."""


class CrashError(Exception):
    """An exception that ends a run like a fault outside loopscope."""


@dataclass(frozen=True, kw_only=True)
class OracleConfig(ExperimentConfig):
    """Options of the oracle's experiments.

    Args:
        p: the modulus, which hooks read.
        kind: which model.
    """

    p: int = models.MODULUS
    kind: str = "pairs"
    batch_size: int = models.BATCH_ROWS


class OracleRunner(ExperimentRunner[OracleConfig]):
    """Common base of both experiments."""

    config_class = OracleConfig
    strategies = ("only",)
    judged = 0

    def build_model(self) -> nn.Module:
        return models.build_model(self.config.kind)

    def build_loader(self, strategy: str) -> TensorLoader:
        order = random_order(models.TRAIN_ROWS, self.config.seed)
        return TensorLoader(models.training_data(), self.config.batch_size, order)

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-2)

    def build_scheduler(self, optimizer: torch.optim.Optimizer) -> CosineAnnealingLR:
        return CosineAnnealingLR(optimizer, self.length)

    def compute_loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return models.mean_loss(model, batch)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return models.evaluate(model)

    def should_stop(self, evaluation: Mapping[str, float]) -> bool:
        self.judged += 1
        if self.judged in CRASHES:
            raise CrashError(f"evaluation {self.judged}")
        return False


class OracleEpochs(OracleRunner):
    """The oracle's training in the epoch loop."""

    name: ClassVar[str] = "oracle_epochs"
    loop = "epoch"

    @property
    def length(self) -> int:
        return EPOCHS


class OracleSteps(OracleRunner):
    """The oracle's training in the step loop."""

    name: ClassVar[str] = "oracle_steps"
    loop = "step"
    scheduler_interval = "step"

    @property
    def length(self) -> int:
        return STEPS


def register() -> None:
    """Register both experiments. This does not happen on import, since other tests of a process list the registry."""
    for experiment in (OracleEpochs, OracleSteps):
        ExperimentRegistry.register(experiment)
