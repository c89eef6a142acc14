"""Base classes of experiments: they define model, data, loss and strategies, but no training loop."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Generic, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ..data import Batch, Loader
from ..hooks import ExperimentRegistry, LoopType
from ..hooks.selection import hook_groups
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
