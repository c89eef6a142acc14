"""Base classes of experiments that train a classifier until it generalises."""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeVar

import torch
from loopscope.data import Batch
from loopscope.hooks import LoopType
from loopscope.runs import ExperimentConfig, ExperimentRunner, require
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler


@dataclass(frozen=True, kw_only=True)
class GrokkingConfig(ExperimentConfig):
    """Options of an experiment that trains a classifier until it generalises.

    Args:
        epochs: epochs of the learning-rate decay, and of training unless it stops earlier.
        max_epochs: epochs after which to stop, at any point of the decay; by default, epochs.
        lr: learning rate at the start.
        min_lr: learning rate at the end of the cosine decay.
        weight_decay: weight decay (decoupled for adamw).
        optimizer: adamw, adam or sgd (with momentum 0.9).
        beta2: decay of the second moment (adamw and adam).
        target_acc: validation accuracy, as a fraction, at which a run stops.
    """

    epochs: int = 1000
    max_epochs: int | None = None
    lr: float = 1e-3
    min_lr: float = 0.0
    weight_decay: float = 0.1
    optimizer: Literal["adamw", "adam", "sgd"] = "adamw"
    beta2: float = 0.999
    target_acc: float = 0.995

    def __post_init__(self) -> None:
        """Check every value."""
        super().__post_init__()
        self.at_least(1, "epochs")
        if self.max_epochs is not None:
            self.at_least(1, "max_epochs")
        require(0 <= self.beta2 < 1, f"beta2 is {self.beta2}; it must be in [0, 1).")
        self.above(0, "lr")
        self.at_least(0, "weight_decay")
        require(0 <= self.min_lr <= self.lr, f"min_lr is {self.min_lr}; it must be in 0..lr ({self.lr}).")
        accepted = "a fraction in (0, 1]: 99.5 % is 0.995"
        require(0 < self.target_acc <= 1, f"target_acc is {self.target_acc}; it must be {accepted}.")


Grokking = TypeVar("Grokking", bound=GrokkingConfig)


class GrokkingRunner(ExperimentRunner[Grokking]):
    """A classifier on (inputs, targets) batches in the epoch loop, stopping at a validation accuracy.

    Cross-entropy loss, cosine decay per epoch, accuracy and loss on the sets of :meth:`evaluation_sets`.
    """

    loop: ClassVar[LoopType] = "epoch"
    evaluation_batch: ClassVar[int] = 8192

    @abstractmethod
    def evaluation_sets(self) -> Mapping[str, tuple[Tensor, Tensor]]:
        """Return (inputs, targets) by set name; ``train`` and ``val`` give ``train_acc`` and ``val_acc``."""

    @property
    def length(self) -> int:
        """Epochs to train at most."""
        config = self.config
        return config.epochs if config.max_epochs is None else min(config.epochs, config.max_epochs)

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        """Return the configured optimizer."""
        config = self.config
        if config.optimizer == "sgd":
            return SGD(model.parameters(), lr=config.lr, momentum=0.9, weight_decay=config.weight_decay)
        kind = AdamW if config.optimizer == "adamw" else Adam
        betas = (0.9, config.beta2)
        return kind(model.parameters(), lr=config.lr, betas=betas, weight_decay=config.weight_decay, fused=True)

    def build_scheduler(self, optimizer: Optimizer) -> LRScheduler:
        """Return a cosine decay from ``lr`` to ``min_lr`` over ``epochs``."""
        return CosineAnnealingLR(optimizer, self.config.epochs, self.config.min_lr)

    def compute_loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean cross-entropy."""
        inputs, targets = batch
        return functional.cross_entropy(model(inputs), targets)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Return ``<set>_acc`` (a fraction) and ``<set>_loss`` (mean cross-entropy, nats) of every set."""
        results: dict[str, float] = {}
        for name, (inputs, targets) in self.evaluation_sets().items():
            correct = torch.zeros((), dtype=torch.int64, device=inputs.device)
            loss = torch.zeros((), dtype=torch.float64, device=inputs.device)
            size = self.evaluation_batch
            for x, y in zip(torch.split(inputs, size), torch.split(targets, size), strict=True):
                logits = model(x)
                correct += (logits.argmax(-1) == y).sum()
                loss += functional.cross_entropy(logits, y, reduction="sum")
            results[f"{name}_acc"] = float(correct) / len(targets)
            results[f"{name}_loss"] = float(loss) / len(targets)
        return results

    def should_stop(self, evaluation: Mapping[str, float]) -> bool:
        """Return whether the validation accuracy has reached the target."""
        return evaluation["val_acc"] >= self.config.target_acc
