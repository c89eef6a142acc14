"""Base classes of experiments: they define model, data, loss and strategies, but no training loop."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler

from ..data import Batch, Loader
from ..errors import require
from ..hooks import ExperimentRegistry, LoopType, hook_groups
from .checks import check_experiment
from .config import ExperimentConfig

Config = TypeVar("Config", bound=ExperimentConfig)
OptionsByHook = Mapping[str, Mapping[str, Any]]


class ExperimentRunner(ABC, Generic[Config]):
    """An experiment: model, data, loss and evaluation, under one or more strategies.

    Subclasses are registered with ``@ExperimentRegistry.register``. Everything is built again for each strategy,
    right after seeding, so that all strategies start from the same weights.
    """

    name: ClassVar[str]
    config_class: ClassVar[type[ExperimentConfig]]
    strategies: Sequence[str]
    """Names of the strategies; by its options an instance may have more than its class."""
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Named sets of options, for ``--preset``."""
    loop: ClassVar[LoopType] = "epoch"
    scheduler_interval: ClassVar[Literal["epoch", "step"]] = "epoch"
    minimal_hooks: ClassVar[Sequence[str]] = ()
    """The hooks of the group ``minimal``."""
    default_group: ClassVar[str | None] = None
    """The default of ``--with-hooks``; ``--with-hooks none`` switches it off."""
    compared_metrics: ClassVar[Sequence[str]] = ()
    """Full names of metrics in which strategies are compared at the end, in addition to the final evaluation."""
    best_metric: ClassVar[str] = "val_loss"
    """The number of the evaluation that selects the best checkpoint, the lowest being the best. A scheduler that takes
    a metric receives it too."""
    live_metrics: ClassVar[Mapping[str, Sequence[str]]] = {}
    """Full names of metrics worth watching, by group."""
    progress_metrics: ClassVar[Mapping[str, Sequence[str]]] = {}
    """Full names of metrics in the progress line, by label."""
    compared_to: ClassVar[Mapping[str, str]] = {}
    """Numbers of the final evaluation, each with the strategy that the comparison shows differences from."""

    def __init__(self, config: Config, device: torch.device | None = None) -> None:
        self.config: Config = config
        self.device = device or torch.device("cpu")

    @classmethod
    def check_class(cls) -> None:
        """Raise :class:`UsageError` for an invalid class; called when it is registered."""
        check_experiment(cls, ExperimentRunner)

    @property
    def hook_sets(self) -> Mapping[str, Sequence[str]]:
        """The groups of ``--with-hooks``; none of them contains a committing or a debug hook."""
        return hook_groups(self.minimal_hooks)

    @property
    @abstractmethod
    def length(self) -> int:
        """Epochs (step loop: steps) to train at most."""

    @abstractmethod
    def build_model(self) -> nn.Module:
        """Return a freshly initialised model."""

    @abstractmethod
    def build_loader(self, strategy: str) -> Loader:
        """Return the training data for this strategy."""

    @abstractmethod
    def build_optimizer(self, model: nn.Module) -> Optimizer:
        """Return the optimizer of the model's parameters."""

    @abstractmethod
    def compute_loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean loss on one batch, of shape ()."""

    @abstractmethod
    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Return named numbers; called in eval mode, without gradients, on separate random streams."""

    def prepare_model(self, model: nn.Module, strategy: str) -> nn.Module:
        """Return the model for one strategy, with other layers for example; its weights are already initialised."""
        return model

    def build_scheduler(self, optimizer: Optimizer) -> LRScheduler | None:
        """Return the learning-rate schedule, or ``None`` for a constant learning rate."""
        return None

    def tensor_parallel_plan(self, model: nn.Module) -> Mapping[str, Any]:
        """Return the ``ParallelStyle`` of each layer that ``--parallel tp`` splits, by its name; empty by default."""
        return {}

    def should_stop(self, evaluation: Mapping[str, float]) -> bool:
        """Return whether the numbers of an evaluation show that the run has reached its goal and can end."""
        return False

    def target_grad(self, model: nn.Module) -> dict[str, Tensor] | None:
        """Return the experiment's target gradient by parameter name, for hooks with ``needs_target_grad``."""
        return None

    def strategy_hooks(self, strategy: str) -> OptionsByHook:
        """Return the hooks that are part of one strategy, with their options by hook name."""
        return {}

    def describe_data(self) -> Mapping[str, Any]:
        """Return the source of the data, as plain values for ``experiment_config.json``."""
        return {}

    def describe_row(self, index: int) -> Any:
        """Return a readable form of row ``index`` of the training data: a text, plain values, or an image tensor.

        ``index`` is a number from :meth:`.Loader.row_indices`. The default is ``None``: no description.
        """
        return None

    def sample(self, model: nn.Module) -> str | None:
        """Return a text that demonstrates the trained model; called at the end, like :meth:`evaluate`."""
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return the experiment's state, if the run depends on it."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that :meth:`state_dict` returned."""


ExperimentRegistry.base = ExperimentRunner  # lets the registry find subclasses that are not registered


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
